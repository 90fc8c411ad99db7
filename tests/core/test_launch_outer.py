"""Ranks that srun, mpirun or somebody else has started."""

from __future__ import annotations

import pytest

from dsx.errors import DsxError
from dsx.launch.outer import first_host, outer_ranks

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-09,12],login1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-node-99@1",
}


def test_slurm() -> None:
    found = outer_ranks(SLURM)
    assert found is not None
    assert 15_000 <= int(found.pop("MASTER_PORT")) < 30_000
    assert found == {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu07"}


def test_all_ranks_find_one_port_and_another_step_another() -> None:
    ports = [
        (outer_ranks({**SLURM, "SLURM_PROCID": rank, "SLURM_STEP_ID": step}) or {})["MASTER_PORT"]
        for rank, step in (("0", "0"), ("7", "0"), ("0", "1"))
    ]
    assert ports[0] == ports[1] != ports[2]


def test_a_step_has_its_own_number_of_tasks() -> None:
    assert (outer_ranks({**SLURM, "SLURM_STEP_NUM_TASKS": "4"}) or {})["WORLD_SIZE"] == "4"


def test_a_batch_script_is_no_rank() -> None:
    script = {name: value for name, value in SLURM.items() if "STEP" not in name}
    assert outer_ranks(script) is None


def test_one_task_launches_its_own_ranks() -> None:
    assert outer_ranks({**SLURM, "SLURM_NTASKS": "1"}) is None
    assert outer_ranks({}) is None


def test_open_mpi_on_one_host() -> None:
    found = outer_ranks(OPEN_MPI)
    assert found is not None
    assert found["MASTER_ADDR"] == "127.0.0.1"
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("1", "2", "1")


def test_open_mpi_on_several_hosts_needs_to_be_told_of_the_first() -> None:
    spread = {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"}
    with pytest.raises(DsxError, match="mpirun does not tell the ranks on which host rank 0 is") as caught:
        outer_ranks(spread)
    assert "mpirun -x MASTER_ADDR=node1 dsx run" in str(caught.value)
    assert (outer_ranks({**spread, "MASTER_ADDR": "n1", "MASTER_PORT": "7"}) or {})["MASTER_PORT"] == "7"


def test_a_rank_of_nothing_is_refused() -> None:
    with pytest.raises(DsxError, match="mpirun says that this is rank 1, but not of how many") as caught:
        outer_ranks({"OMPI_COMM_WORLD_RANK": "1"})
    assert "expected: OMPI_COMM_WORLD_SIZE" in str(caught.value)


def test_mpich() -> None:
    found = outer_ranks({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "0"})
    assert found is not None
    assert found["LOCAL_RANK"] == "0"


def test_torchruns_environment_is_taken_as_it_is() -> None:
    assert outer_ranks({**SLURM, "RANK": "0", "WORLD_SIZE": "2"}) == {}


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("a,b", "a"),
        ("gpu[07-09,12]-ib,login1", "gpu07-ib"),
        ("r[1-2]n[3,5]", "r1n3"),
    ],
)
def test_the_first_host_of_slurms_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first
