"""Ranks that another launcher has started: srun, mpirun, torchrun, or whoever sets RANK and WORLD_SIZE."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping

from attrs import frozen

from dsx.errors import DsxError

_FIRST_PORT, _PORTS = 15_000, 15_000


@frozen
class _Launcher:
    """The variables in which a launcher tells each rank who it is.

    jobs   the first that is set tells two runs on one host apart
    """

    name: str
    rank: str
    sizes: tuple[str, ...]
    local_rank: str
    local_size: str
    jobs: tuple[str, ...]


_LAUNCHERS = (
    _Launcher(
        "srun",
        "SLURM_PROCID",
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        "SLURM_LOCALID",
        "",
        ("SLURM_JOB_ID",),
    ),
    _Launcher(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"),
    ),
    _Launcher(
        "mpiexec", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ("PMI_JOBID", "HYDI_CONTROL_FD")
    ),
)


def outer_ranks(environment: Mapping[str, str]) -> dict[str, str] | None:
    """RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT of a rank that another launcher started.

    None if none did, or started this process alone. What is set already is kept. Raises DsxError, naming the variable
    and where to set it, for what the launcher does not tell.
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return {}
    launcher = next((known for known in _LAUNCHERS if _started(known, environment)), None)
    if launcher is None:
        return None
    found = {
        "RANK": environment[launcher.rank],
        "WORLD_SIZE": _size(launcher, environment),
        "LOCAL_RANK": environment.get(launcher.local_rank, ""),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or _address(launcher, environment),
        "MASTER_PORT": environment.get("MASTER_PORT") or _port(launcher, environment),
    }
    return {name: value for name, value in found.items() if value}


def _started(launcher: _Launcher, environment: Mapping[str, str]) -> bool:
    """A batch script is told of its job's tasks too, but is none of them; tasks that srun starts are in a step."""
    in_script = "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment
    if launcher.rank not in environment or (launcher.rank == "SLURM_PROCID" and in_script):
        return False
    return _size(launcher, environment) != "1"


def _size(launcher: _Launcher, environment: Mapping[str, str]) -> str:
    for name in launcher.sizes:
        if environment.get(name):
            return environment[name]
    raise DsxError(
        f"{launcher.name} says that this is rank {environment[launcher.rank]}, but not of how many",
        where="environment",
        expected=" or ".join(launcher.sizes),
        remedy="set RANK and WORLD_SIZE for each rank, or unset "
        f"{launcher.rank} and let `dsx run --nproc N` start the ranks",
    )


def _address(launcher: _Launcher, environment: Mapping[str, str]) -> str:
    """Rank 0's host."""
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if launcher.name == "srun" and environment.get(name):
            return first_host(environment[name])
    if environment.get(launcher.local_size) == _size(launcher, environment):
        return "127.0.0.1"
    raise DsxError(
        f"{launcher.name} does not tell the ranks on which host rank 0 is",
        where="environment",
        expected="MASTER_ADDR",
        remedy=f"set MASTER_ADDR to that host's name for all ranks, such as `{_example(launcher)} dsx run ...`",
    )


def _example(launcher: _Launcher) -> str:
    if launcher.name == "mpirun":
        return "mpirun -x MASTER_ADDR=node1"
    return f"MASTER_ADDR=node1 {launcher.name}"


def first_host(hosts: str) -> str:
    """The first of Slurm's list of hosts: of "gpu[07-09,12]-ib,login1", "gpu07-ib"."""
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])+", hosts)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[0]) if match else hosts


def _port(launcher: _Launcher, environment: Mapping[str, str]) -> str:
    """The same on all ranks, and likely another than that of a second run on rank 0's host."""
    job = next((environment[name] for name in launcher.jobs if environment.get(name)), "")
    step = environment.get("SLURM_STEP_ID", "")
    return str(_FIRST_PORT + zlib.crc32(f"{job}.{step}".encode()) % _PORTS)
