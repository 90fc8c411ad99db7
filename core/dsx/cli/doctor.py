"""`dsx doctor`: what of this machine and environment dsx can use, and what each absence costs."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs
import click
from attrs import frozen

from dsx.entries import COMMANDS, PLUGINS, Entries, Registration
from dsx.errors import DsxError
from dsx.host import cores, memory

if TYPE_CHECKING:
    from dsx.plan.profile import Profile

_GB = 1e9
_LITTLE_SPACE = 1 * _GB
_BUSY = 0.5
"""Of the cores: with more of them at work for others, what is measured says little."""


@frozen
class Finding:
    """What one check found.

    check   what was looked at
    state   ok; note: dsx works, at a cost; broken: to be mended
    found   what is there
    advice  what its absence costs, or how to mend it
    """

    check: str
    state: Literal["ok", "note", "broken"]
    found: str
    advice: str = ""


@click.command()
@click.option("--plugins", "load", is_flag=True, help="Import every installed plugin too, and say which cannot be.")
@click.option("--profile", "profiles", is_flag=True, help="Measure this machine for `dsx plan` instead: half a minute.")
@click.option(
    "--nproc",
    type=click.IntRange(1),
    help="With --profile: measure one rank and so many at once. Default: one for each GPU, else one for each of two "
    "cores.",
)
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
@click.pass_context
def command(ctx: click.Context, load: bool, profiles: bool, nproc: int | None, as_json: bool) -> None:
    """Say what of this machine dsx can use, what each absence costs, and what is broken.

    With --profile: measure how fast it computes, moves memory and lets ranks talk, and keep that for `dsx plan`.

    Exit code 0, or 1 if something is broken.
    """
    if profiles:
        _profile(nproc, as_json)
        return
    if nproc is not None:
        raise click.UsageError("--nproc says with how many ranks --profile measures.")
    findings = [*examine(), *(_loaded() if load else ())]
    if as_json:
        click.echo(json.dumps([attrs.asdict(finding) for finding in findings], indent=2))
    else:
        _show(findings)
    ctx.exit(any(finding.state == "broken" for finding in findings))


def examine() -> Iterator[Finding]:
    """Every check but the import of plugins."""
    yield Finding("python", "ok", f"{platform.python_version()} at {sys.executable}, {platform.platform(terse=True)}")
    yield from _distribution()
    yield from _torch()
    yield _memory()
    yield _compiler()
    yield _package("triton", ("triton",), "GPU kernels in Triton do not run, nor torch.compile on GPUs")
    yield _package("cupy", _cupys(), "GPU kernels in CUDA C++ do not run; others take their place, more slowly")
    yield _disk("folder", Path.cwd(), "runs write here unless run.out names another folder")
    yield _disk("temp", Path(tempfile.gettempdir()), "ranks write their logs here; set TMPDIR to another folder")
    yield from _registrations()
    yield from _commands()


def _show(findings: list[Finding]) -> None:
    colours = {"ok": "green", "note": "yellow", "broken": "red"}
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        state = click.style(f"{finding.state:6}", fg=colours[finding.state])
        click.echo(f"{state}  {finding.check:{width}}  {finding.found}")
        if finding.advice:
            click.echo(f"{'':6}  {'':{width}}  {finding.advice}")
    broken = [finding.check for finding in findings if finding.state == "broken"]
    click.echo(f"\nbroken: {', '.join(broken)}" if broken else "\nnothing is broken")


def _profile(nproc: int | None, as_json: bool) -> None:
    import torch

    from dsx.plan.profile import measure, save

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device("cuda" if gpus else "cpu")
    most, load = nproc or gpus or min(2, cores()), os.getloadavg()[0]
    found = [measure(device, ranks, show=True) for ranks in sorted({1, most})]
    file = save(found)
    if as_json:
        click.echo(json.dumps([attrs.asdict(profile) for profile in found], indent=2))
    else:
        _show_profiles(found, file)
        if load > _BUSY * cores():
            click.echo(f"other programs kept {load:.1f} of {cores()} cores busy: measure again when they are done")


def _show_profiles(profiles: Sequence[Profile], file: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    machine = profiles[0].machine
    table = Table(box=None, pad_edge=False)
    table.add_column("of each rank")
    for profile in profiles:
        ranks = f"{profile.ranks} rank{'s' if profile.ranks > 1 else ''}"
        table.add_column(f"{ranks}, {_threads_in_words(profile.threads)}", justify="right")
    columns = [dict(_rows(profile)) for profile in profiles]
    for name in {name: None for column in columns for name in column}:
        table.add_row(name, *(column.get(name, "") for column in columns))
    gpu = "" if machine.device == "cpu" else f", {machine.device}"
    click.echo(f"{machine.cpu}, {machine.cores} cores{gpu}, torch {machine.torch}")
    Console().print(table)
    click.echo(f"kept for `dsx plan` in {file}")


def _rows(profile: Profile) -> Iterator[tuple[str, str]]:
    """What was measured, with units."""
    for kind, rate in profile.flops_per_s.items():
        yield f"products, {kind}", f"{rate / 1e9:,.0f} GFLOP/s"
    yield "other operations", f"{profile.moved_per_s / _GB:,.1f} GB/s"
    yield "optimizer", f"{profile.updated_per_s / _GB:,.1f} GB/s"
    yield "an operation's call", f"{profile.seconds_per_call * 1e6:,.1f} us"
    if (exchange := profile.exchange) is not None:
        yield "gathered from other ranks", f"{exchange.gathered_per_s / _GB:,.1f} GB/s"
        yield "reduced with other ranks", f"{exchange.reduced_per_s / _GB:,.1f} GB/s"
        yield "a message", f"{exchange.seconds_per_message * 1e6:,.0f} us"
        yield "free behind computing", f"{exchange.overlap:.0%}"


def _threads_in_words(threads: int) -> str:
    return f"{threads} thread{'s' if threads > 1 else ''} each"


def _distribution() -> Iterator[Finding]:
    version = _version("dsx-engine")
    if version is None:
        advice = "without its metadata dsx finds no plugin, not even its own: pip install dsx-engine"
        yield Finding("dsx", "broken", "the distribution dsx-engine is not installed", advice)
    else:
        yield Finding("dsx", "ok", f"dsx-engine {version} at {Path(__file__).parents[1]}")
    foreign = _version("dsx")
    if foreign is not None:
        yield Finding(
            "dsx",
            "broken",
            f"the distribution `dsx` {foreign}, somebody else's, is installed too, and both write to a package `dsx`",
            "pip uninstall dsx dsx-engine, then pip install dsx-engine",
        )


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except Exception as error:
        advice = "nothing trains without it: pip install torch, of 2.11 or newer"
        yield Finding("torch", "broken", f"cannot be imported: {type(error).__name__}: {error}", advice)
        return
    cuda, hip = torch.version.cuda, torch.version.hip
    build = f"built for CUDA {cuda}" if cuda else f"built for ROCm {hip}" if hip else "built for CPUs only"
    yield Finding("torch", "ok", f"{torch.__version__}, {build}")
    yield from _devices(torch, bool(cuda or hip))
    yield from _backends(torch)
    yield _threads(torch)


def _devices(torch: Any, build_has_gpus: bool) -> Iterator[Finding]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            for index in range(count):
                properties = torch.cuda.get_device_properties(index)
                yield Finding(f"GPU {index}", "ok", f"{properties.name}, {properties.total_memory / _GB:.0f} GB")
        except Exception as error:
            yield Finding("GPU", "broken", f"{type(error).__name__}: {error}", "run nvidia-smi, and look at the driver")
            return
    if count:
        return
    cost = "runs train on the CPU: fine for small models and for trying things out"
    if build_has_gpus:
        said = "; ".join(str(warning.message).splitlines()[0] for warning in caught)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = f" (CUDA_VISIBLE_DEVICES is '{visible}')" if visible is not None else ""
        yield Finding("GPU", "note", f"none is visible to torch{hidden}{f': {said}' if said else ''}", cost)
    else:
        yield Finding("GPU", "note", "none that this build of torch could use", cost)


def _backends(torch: Any) -> Iterator[Finding]:
    costs = {
        "gloo": "several ranks on CPUs cannot talk to each other",
        "nccl": "several ranks on GPUs cannot talk to each other; without GPUs this costs nothing",
        "mpi": "",
        "ucc": "",
    }
    distributed = torch.distributed
    for name, cost in costs.items():
        if distributed.is_available() and getattr(distributed, f"is_{name}_available")():
            yield Finding(name, "ok", "in this build of torch")
        elif cost:
            yield Finding(name, "note", "not in this build of torch", cost)
        else:
            yield Finding(name, "ok", "not in this build of torch, and no part of dsx uses it")


def _threads(torch: Any) -> Finding:
    free = cores()
    threads, setting = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    told = f"OMP_NUM_THREADS is '{setting}'" if setting else "OMP_NUM_THREADS is not set"
    found = f"torch uses {threads} of {free} cores; {told}"
    if threads > free:
        return Finding("threads", "note", found, "more threads than cores are slower than one for each")
    if setting:
        return Finding("threads", "ok", f"{found}, and counts for each rank")
    return Finding("threads", "ok", f"{found}: with --nproc, ranks share the cores")


def _memory() -> Finding:
    found = memory()
    if found is None:
        return Finding("memory", "note", "this host does not say how much is free", "dsx plan says what a run takes")
    bound = "" if found.limit is None else f", of {found.limit / _GB:.1f} GB that this container may use"
    return Finding("memory", "ok", f"{found.available / _GB:.1f} GB free{bound}")


def _compiler() -> Finding:
    cost = "kernels for CPUs run as plain PyTorch, more slowly, and torch.compile does not work on CPUs"
    chosen = os.environ.get("CXX")
    found = next(filter(None, map(shutil.which, [chosen.split()[0]] if chosen else ["c++", "g++", "clang++"])), None)
    if found is None:
        said = f"CXX names '{chosen}', which is not there" if chosen else "no c++, g++ or clang++ on the PATH"
        return Finding("compiler", "note", said, cost)
    try:
        done = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("compiler", "note", f"{found} does not work: {error}", cost)
    return Finding("compiler", "ok", f"{found}: {(done.stdout.splitlines() or ['?'])[0]}")


def _package(module: str, distributions: tuple[str, ...], cost: str) -> Finding:
    """A package that is looked for, but not imported: that would take seconds, or start a GPU."""
    versions = {name: version for name in distributions if (version := _version(name))}
    if importlib.util.find_spec(module) is None:
        if versions:
            return Finding(module, "broken", f"{_listed(versions)} is installed, but has no package {module}", cost)
        return Finding(module, "note", "not installed", cost)
    if len(versions) > 1:
        advice = "they overwrite each other's files: uninstall all, and install the one for your CUDA"
        return Finding(module, "broken", _listed(versions), advice)
    return Finding(module, "ok", _listed(versions) or "there, but of no distribution")


def _cupys() -> tuple[str, ...]:
    """CuPy comes as one distribution for each version of CUDA or ROCm."""
    names = {_normalised(found.metadata["Name"]) for found in metadata.distributions() if found.metadata["Name"]}
    return tuple(sorted(name for name in names if name == "cupy" or name.startswith(("cupy-cuda", "cupy-rocm"))))


def _disk(check: str, folder: Path, use: str) -> Finding:
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding(check, "broken", f"{folder}: {error.strerror}", use)
    found = f"{free / _GB:.1f} GB free in {folder}"
    if not os.access(folder, os.W_OK):
        return Finding(check, "note", f"{found}, which cannot be written to", use)
    return Finding(check, "ok", found) if free >= _LITTLE_SPACE else Finding(check, "note", found, use)


def _registrations() -> Iterator[Finding]:
    entries = Entries.scan(PLUGINS)
    packages = {entry.distribution for entry in entries.registrations}
    yield Finding("plugins", "ok", f"{len(entries.names())}, from {len(packages)} installed packages")
    for name, rivals in _rivals(entries).items():
        found = f"'{name}' is registered by {' and by '.join(entry.distribution for entry in rivals)}"
        yield Finding("plugins", "broken", found, "runs that name it are refused: uninstall one of them")
    for note in entries.notes:
        yield Finding("plugins", "broken", note, "reinstall or remove that package: what it registers may be missing")


def _commands() -> Iterator[Finding]:
    for name, rivals in _rivals(Entries.scan(COMMANDS)).items():
        found = f"'dsx {name}' is registered by {' and by '.join(entry.distribution for entry in rivals)}"
        yield Finding("commands", "broken", found, "the command is refused: uninstall one of them")


def _rivals(entries: Entries) -> dict[str, list[Registration]]:
    """Names that more than one distribution registers."""
    found: dict[str, list[Registration]] = defaultdict(list)
    for entry in entries.registrations:
        found[entry.name].append(entry)
    return {name: rivals for name, rivals in found.items() if len(rivals) > 1}


def _loaded() -> Iterator[Finding]:
    from dsx.hooks import Hooks
    from dsx.registry import Registry

    registry = Registry.scan()
    rivals = _rivals(registry.entries)
    for name in (name for name in registry.entries.names() if name not in rivals):
        try:
            Hooks([registry.load(name)])
        except DsxError as error:
            advice = f"`dsx plugins check {name}` shows more; {error.remedy or 'reinstall or mend its package'}"
            yield Finding(f"plugin {name}", "broken", f"{error.what} ({error.where})", advice)
        else:
            yield Finding(f"plugin {name}", "ok", "loads")


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _normalised(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")
