"""What this machine can do, measured once and kept for `dsx plan`."""

from __future__ import annotations

import json
import math
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from attrs import asdict, field, frozen
from attrs.validators import deep_mapping, ge, instance_of, le, min_len
from cattrs import BaseValidationError, Converter

from dsx.errors import DsxError
from dsx.host import cores

_REMEDY = "run `dsx doctor --profile`"
_TARGET = "dsx.plan.meter:measure_rank"


def _rate(instance: object, attribute: object, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{value} where a number above 0 is wanted")


@frozen
class Machine:
    """What makes numbers measured elsewhere worthless.

    cpu     the model's name
    cores   that this process may use
    torch   version
    device  "cpu", or the model of the GPUs
    """

    cpu: str
    cores: int
    torch: str
    device: str

    @classmethod
    def this(cls, device: str) -> Machine:
        """The machine that this runs on; `device` is "cpu" or "cuda"."""
        name = "cpu" if device == "cpu" else torch.cuda.get_device_name()
        return cls(_cpu(), cores(), torch.__version__, name)


@frozen
class Exchange:
    """What ranks of this host reach among themselves, with core's own transport.

    gathered_per_s, reduced_per_s  bytes that leave a rank in a second of all_gather, and of reduce_scatter
    seconds_per_message            of a collective that carries little
    overlap                        the part of an exchange that costs nothing while the rank computes, -1 to 1. On a
                                   CPU whose cores all compute it is about 0, as somebody has to copy, and below 0 where
                                   both get slower by it
    """

    gathered_per_s: float = field(validator=_rate)
    reduced_per_s: float = field(validator=_rate)
    seconds_per_message: float = field(validator=_rate)
    overlap: float = field(validator=[ge(-1.0), le(1.0)])


@frozen
class Profile:
    """What one rank of this machine can do while `ranks` of them are at work, each with its share of the cores.

    kind              "cpu" or "cuda"
    ranks             that were measured, all at once
    threads           of torch, in each
    when              UTC, ISO 8601
    flops_per_s       of matrix products as training makes them, and of attention, by the kinds of `Work.flops`
    moved_per_s       bytes that other operations of forward and backward read and write in a second
    updated_per_s     bytes that an optimizer reads and writes in a second
    seconds_per_call  of an operation on next to nothing: what Python and torch take
    exchange          None for a single rank

    Operations and bytes are counted by `Ledger`, as they are for the runs that are to be estimated.
    """

    machine: Machine
    kind: str
    ranks: int = field(validator=ge(1))
    threads: int
    when: str
    flops_per_s: Mapping[str, float] = field(validator=deep_mapping(instance_of(str), _rate))
    moved_per_s: float = field(validator=_rate)
    updated_per_s: float = field(validator=_rate)
    seconds_per_call: float = field(validator=_rate)
    exchange: Exchange | None


@frozen
class _Kept:
    """The content of the file."""

    profiles: Sequence[Profile] = field(validator=min_len(1))


def measure(device: torch.device, ranks: int, *, seconds: float = 0.3, show: bool = False) -> Profile:
    """Measure this machine with `ranks` processes at once, started as `dsx run --nproc` starts them.

    seconds  to spend on each of some twenty measurements
    show     progress, on stderr

    Raises `RankFailed` where a rank fails.
    """
    from dsx.launch.launch import launch

    with tempfile.TemporaryDirectory(prefix="dsx_profile_") as folder:
        file = Path(folder) / "profile.json"
        arguments = {"device": device.type, "seconds": seconds, "file": str(file), "show": show}
        if code := launch(_TARGET, arguments, ranks):
            raise DsxError("the measurement was stopped", found=f"exit code {code}")
        return load(device.type, ranks, file)


def save(profiles: Sequence[Profile], path: Path | None = None) -> Path:
    """Keep profiles in place of those measured before; `path` defaults to `place()`. Returns the file.

    Raises `DsxError` where it cannot be written.
    """
    path = path or place()
    partial = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(asdict(_Kept(profiles)), indent=2))
        partial.replace(path)
    except OSError as error:
        raise DsxError(
            "the profile of this machine cannot be written",
            where=str(path),
            found=error.strerror,
            remedy="set XDG_CACHE_HOME to a folder that can be written to",
        ) from error
    return path


def load(kind: str, ranks: int, path: Path | None = None) -> Profile:
    """The profile for `ranks` ranks on this host's "cpu" or "cuda"; else that of the next higher number of ranks, else
    that of the highest.

    Raises `DsxError`, saying what to do, where there is none, or it is damaged, or of another machine or torch.
    """
    path = path or place()
    found = sorted((each for each in _read(path) if each.kind == kind), key=lambda each: each.ranks)
    if not found:
        raise DsxError(f"this machine was not measured with {kind} ranks", where=str(path), remedy=_REMEDY)
    chosen = next((each for each in found if each.ranks >= ranks), found[-1])
    _refuse_other(chosen.machine, Machine.this(kind), path)
    return chosen


def place() -> Path:
    """The file for this user."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "dsx" / "profile.json"


def _read(path: Path) -> Sequence[Profile]:
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise DsxError("this machine was not measured yet", where=str(path), remedy=_REMEDY) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DsxError(
            "the profile of this machine cannot be read", where=str(path), found=str(error), remedy=_REMEDY
        ) from error
    try:
        return Converter(forbid_extra_keys=True).structure(json.loads(text), _Kept).profiles
    except (ValueError, TypeError, AttributeError, BaseValidationError) as error:  # cattrs asks a list for its keys
        raise DsxError(
            "the profile of this machine is damaged, or of another release of dsx", where=str(path), remedy=_REMEDY
        ) from error


def _refuse_other(kept: Machine, here: Machine, path: Path) -> None:
    for what, before, now in zip(("CPU", "cores", "torch", "device"), _facts(kept), _facts(here), strict=True):
        if before != now:
            raise DsxError(
                f"the profile was measured with another {what}",
                where=str(path),
                expected=now,
                found=before,
                remedy=_REMEDY,
            )


def _facts(machine: Machine) -> tuple[str, ...]:
    return machine.cpu, str(machine.cores), machine.torch, machine.device


def _cpu() -> str:
    """The model's name; where the system does not tell, the architecture's."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
