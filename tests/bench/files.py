"""The file engine (`dsx_kernels.aio`) against fio, on the same disk in the same run.

    python tests/bench/files.py FOLDER [--size 1024] [--rounds 9] [--threads 4] [--checksums] [--json OUT]

Each moves the same bytes past the page cache in pieces of 1 MiB, over files of `--size` MiB that were written before:

read   all of it once
write  all of it once
mixed  an optimizer's update: each byte is read and written once, the read of the next slab beside the write of the last

Ways take turns, round by round, and the order turns too. fio runs once with as many threads of pread and pwrite (psync)
and once with as many transfers in flight of one thread (libaio).

GB/s      median of the rounds
of fio    median, over the rounds, of dsx's rate by the better of fio's in that round; least and greatest in brackets
CPU       seconds of processor time for each GB, of dsx
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from dsx_kernels.aio import Files, Ticket, aligned

Way = Callable[[], float]
MIB = 1 << 20
SLAB = 8 * MIB
"""Of a request: an optimizer's piece of master and moments."""

DIRECTIONS = {"read": "read", "write": "write", "mixed": "rw"}


class Dsx:
    """Slabs read and written with a few in flight."""

    def __init__(self, folder: Path, size: int, threads: int, checksums: bool) -> None:
        self.files = Files(folder, size, threads=threads, checksums=checksums)
        self.size, self.slabs = size, [aligned(SLAB) for _ in range(4)]
        for slab in self.slabs:
            slab.random_(0, 255)
        self.processor = 0.0

    def rate(self, direction: str) -> float:
        """GB/s of reads and writes together."""
        before, start = time.process_time(), time.perf_counter()
        (self.mixed if direction == "mixed" else lambda: self.one_way(direction))()
        seconds = time.perf_counter() - start
        moved = self.size * (2 if direction == "mixed" else 1)
        self.processor = (time.process_time() - before) / (moved / 1e9)
        return moved / seconds / 1e9

    def one_way(self, direction: str) -> None:
        start = self.files.read if direction == "read" else self.files.write
        flying: deque[Ticket] = deque()
        for number, offset in enumerate(range(0, self.size, SLAB)):
            if len(flying) == len(self.slabs):
                flying.popleft().wait()
            flying.append(start(offset, self.slabs[number % len(self.slabs)]))
        for ticket in flying:
            ticket.wait()

    def mixed(self) -> None:
        """Each slab is read two ahead of where the update is, and written back behind it."""
        offsets, slabs = range(0, self.size, SLAB), self.slabs
        reads = {number: self.files.read(offsets[number], slabs[number]) for number in range(2)}
        writes: dict[int, Ticket] = {}
        for number, offset in enumerate(offsets):
            reads.pop(number).wait()
            writes[number] = self.files.write(offset, slabs[number % 4])
            if number + 2 < len(offsets):
                if number >= 2:
                    writes.pop(number - 2).wait()
                reads[number + 2] = self.files.read(offsets[number + 2], slabs[(number + 2) % 4])
        for ticket in writes.values():
            ticket.wait()


def fio(file: Path, size: int, direction: str, engine: str, count: int) -> float:
    """GB/s of reads and writes together, by fio's own clock."""
    command = ["fio", "--name=dsx", f"--filename={file}", "--direct=1", "--bs=1M", f"--rw={direction}", "--thread"]
    if engine == "psync":
        share = size // count // MIB * MIB
        command += [f"--numjobs={count}", f"--size={share}", f"--offset_increment={share}", "--group_reporting"]
    else:
        command += [f"--iodepth={count}", f"--size={size}"]
    command += [f"--ioengine={engine}", "--output-format=json", "--randrepeat=0", "--refill_buffers=0"]
    if direction == "rw":
        # a mix passes over the file once in all; twice is what the update does
        command += ["--rwmixread=50", "--loops=2"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    milliseconds = max(job[way]["runtime"] for way in ("read", "write"))
    return sum(job[way]["io_bytes"] for way in ("read", "write")) / milliseconds / 1e6


def measure(folder: Path, choices: argparse.Namespace) -> list[dict[str, Any]]:
    """One record for each direction."""
    size = choices.size * MIB
    dsx = Dsx(folder, size, choices.threads, choices.checksums)
    if not all(dsx.files.direct):
        print(f"{folder}: the page cache is in the way, and figures are of memory")
    file = folder / "fio"
    fio(file, size, "write", "psync", choices.threads)
    dsx.one_way("write")
    records = []
    for direction, name in DIRECTIONS.items():
        ways: dict[str, Way] = {
            "dsx": lambda direction=direction: dsx.rate(direction),  # type: ignore[misc]
            **{
                f"fio {engine}": lambda name=name, engine=engine: fio(file, size, name, engine, choices.threads)  # type: ignore[misc]
                for engine in ("psync", "libaio")
            },
        }
        records.append({"direction": direction, **rounds_of(ways, choices.rounds), "processor": dsx.processor})
    dsx.files.close()
    return records


def rounds_of(ways: Mapping[str, Way], rounds: int) -> dict[str, Any]:
    """Rates of each way, and dsx's share of the better of the others', round by round."""
    names = list(ways)
    rates: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            rates[name].append(ways[name]())
    best = [max(several) for several in zip(*(rates[name] for name in names[1:]), strict=True)]
    shares = [own / other for own, other in zip(rates["dsx"], best, strict=True)]
    return {"rates": rates, "shares": shares}


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table."""
    names = list(records[0]["rates"])
    lines = [f"| | {' | '.join(f'{name}, GB/s' for name in names)} | of fio | CPU, s/GB |", "|---" * 6 + "|"]
    for row in records:
        rates = " | ".join(f"{median(row['rates'][name]):.2f}" for name in names)
        shares = row["shares"]
        spread = f"{median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})"
        lines.append(f"| {row['direction']} | {rates} | {spread} | {row['processor']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", type=int, default=1024, help="MiB")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--checksums", action="store_true")
    parser.add_argument("--json", type=Path, metavar="OUT")
    choices = parser.parse_args()
    if shutil.which("fio") is None:
        parser.error("fio is not installed: apt-get install fio")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=choices.folder) as folder:
        records = measure(Path(folder), choices)
    print(table(records))
    if choices.json:
        choices.json.write_text(json.dumps(records))


if __name__ == "__main__":
    main()
