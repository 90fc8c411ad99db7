"""The measurement: systems take turns, their losses are compared, what fails is put aside."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partition_systems.case import Case
from partition_systems.catalogue import DEEPSPEED, REFERENCE, SYSTEMS
from partition_systems.fleet import Fleet, SystemFailed, start
from partition_systems.network import Host

STEPS = 2
"""In a row, of which the first is not measured."""
WARM_ROUNDS = 2
FIRST_S, TURN_S = 1200.0, 300.0
"""DeepSpeed's first step may compile for minutes; a step over a slow link takes tens of seconds."""
SPREAD = {"fp32": 1e-4, "bf16": 0.1}
"""How far a loss may be from DDP's. In bf16, masters made from rounded weights alone make some 0.05."""
_IMPORTS, _SPARE = 300 << 20, 0.3
"""Bytes of a process before it has a model; the part of free memory that is left for what systems grow by later."""

Record = dict[str, Any]
Say = Callable[[str], object]
Losses = list[list[float]]


@dataclass(frozen=True)
class Bench:
    """What a measurement runs on.

    case      what all systems train
    hosts     where ranks run, in turn
    isolated  nobody else sends through the hosts' interfaces
    python    the interpreter of a system's ranks
    peers     that of DeepSpeed's
    folder    for what ranks write
    sockets   dsx may not read the memory of ranks on the same host
    """

    case: Case
    hosts: Sequence[Host]
    isolated: bool
    python: str
    peers: str
    folder: Path
    sockets: bool

    def python_of(self, name: str) -> str:
        """The interpreter of a system."""
        return self.peers if SYSTEMS[name].module == DEEPSPEED else self.python

    def sent(self) -> int:
        """Bytes that ranks have sent to each other so far."""
        return sum(host.sent() for host in self.hosts)


def measure(bench: Bench, names: Iterable[str], rounds: int, say: Say) -> dict[str, Record]:
    """Measure systems, in groups that fit into memory, each with DDP.

    Returns a record of each: `failed`, why; else lists of one number a round, in seconds, bytes and ratios, as
    `_note` makes them, and the numbers of the start. Raises SystemFailed if DDP itself fails.
    """
    records: dict[str, Record] = {}
    waiting = [name for name in names if name != REFERENCE]
    for python in {bench.python_of(name) for name in (REFERENCE, *waiting)}:
        subprocess.run([python, "-c", "import torch._dynamo"], check=True)  # from disk, for once
    while waiting or REFERENCE not in records:
        with _loaded(bench, waiting, records, say) as fleets:
            for number in range(WARM_ROUNDS + rounds):
                say(f"round {number + 1} of {WARM_ROUNDS + rounds}, {len(fleets)} systems")
                _round(bench, fleets, number, records)
            for name, fleet in fleets.items():
                records[name]["held"] = max(turn["own"] for turn in fleet.turn(0, TURN_S))
    return records


@contextmanager
def _loaded(bench: Bench, waiting: list[str], records: dict[str, Record], say: Say) -> Iterator[dict[str, Fleet]]:
    """As many of the waiting systems as there is room for, and DDP; takes them off the list."""
    fleets: dict[str, Fleet] = {}
    need, spare = 0, _free_memory() * _SPARE
    try:
        for name in (REFERENCE, *waiting):
            free = _free_memory()
            if len(fleets) > 1 and free < need + spare:
                break
            if name != REFERENCE:
                waiting.remove(name)
            if free < need:
                records[name] = {"failed": f"{free >> 20} MiB are free, a system may need {need >> 20}"}
                continue
            say(f"starting {name}")
            if (fleet := _start(bench, name, records)) is not None:
                fleets[name] = fleet
                need = max(need, bench.case.nproc * (records[name]["start_peak"] + _IMPORTS))
        yield fleets
    finally:
        for fleet in fleets.values():
            fleet.close()


def _free_memory() -> int:
    (line,) = (line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))
    return 1024 * int(line.split()[1])


def _start(bench: Bench, name: str, records: dict[str, Record]) -> Fleet | None:
    """Start a system and note how its first step went; DDP is noted once, though each group has one."""
    folder = bench.folder / f"{len(list(bench.folder.iterdir()))} {name}"
    extra = {"DSX_DIRECT": "0"} if bench.sockets else {}
    fleet = start(SYSTEMS[name], bench.case, bench.python_of(name), bench.hosts, folder, extra)
    try:
        first = fleet.answers(FIRST_S)
    except BaseException as error:
        fleet.close()
        if not isinstance(error, SystemFailed) or name == REFERENCE:
            raise
        records[name] = {"failed": str(error)}
        return None
    records.setdefault(
        name,
        {
            "first_s": max(turn["ends"][0] for turn in first) - fleet.started,
            "start_peak": max(turn["peak"] for turn in first),
            "spread": 0.0,
        },
    )
    return fleet


def _round(bench: Bench, fleets: dict[str, Fleet], number: int, records: dict[str, Record]) -> None:
    """A turn of each system; systems that fail leave `fleets`."""
    names = list(fleets)
    first = number % len(names)
    turns: dict[str, list[dict[str, Any]]] = {}
    sent: dict[str, int] = {}
    for name in names[first:] + names[:first]:
        before = bench.sent()
        try:
            turns[name] = fleets[name].turn(STEPS, TURN_S)
        except SystemFailed as error:
            _put_aside(name, str(error), fleets, records)
        sent[name] = bench.sent() - before
    base = [turn["losses"] for turn in turns[REFERENCE]]
    for name, of_ranks in turns.items():
        spread = _spread([turn["losses"] for turn in of_ranks], base)
        records[name]["spread"] = max(records[name]["spread"], spread)
        if not spread <= (SPREAD[bench.case.dtype] if SYSTEMS[name].alike else float("inf")):
            _put_aside(name, f"in round {number + 1} its loss is {spread:.2g} from DDP's", fleets, records)
        elif number >= WARM_ROUNDS:
            _note(records[name], of_ranks, sent[name] if bench.isolated else None, _wall(turns[REFERENCE]))


def _put_aside(name: str, why: str, fleets: dict[str, Fleet], records: dict[str, Record]) -> None:
    if name == REFERENCE:
        raise SystemFailed(f"{name}: {why}")
    fleets.pop(name).close()
    records[name] = {"failed": why}


def _spread(losses: Losses, base: Losses) -> float:
    """The largest difference, over ranks and steps; NaN if any is."""
    apart = [abs(x - y) for mine, its in zip(losses, base, strict=True) for x, y in zip(mine, its, strict=True)]
    return max(apart) if all(each == each for each in apart) else float("nan")


def _wall(turns: list[dict[str, Any]]) -> float:
    """Seconds of a step, from the end of the turn's first one on the last rank."""
    seconds: float = max(turn["ends"][-1] for turn in turns) - max(turn["ends"][0] for turn in turns)
    return seconds / (STEPS - 1)


def _note(record: Record, turns: list[dict[str, Any]], sent: int | None, reference: float) -> None:
    """Add a round to a record. Memory is that of the rank that has most, CPU time and bytes are the mean of ranks."""
    now = {
        "wall": _wall(turns),
        "ratio": _wall(turns) / reference,
        "cpu": statistics.mean((turn["cpu"][-1] - turn["cpu"][0]) / (STEPS - 1) for turn in turns),
        "rss": max(turn["rss"] for turn in turns),
        "peak": max(turn["peak"] for turn in turns),
        "sent": None if sent is None else sent / STEPS / len(turns),
    }
    for key, value in now.items():
        record.setdefault(key, []).append(value)


def to_stderr(text: str) -> None:
    """Show what is going on, on one line that the next text overwrites."""
    print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
