"""The file engine (`dsx_kernels.aio`) against fio, on the same disk in the same run.

    python tests/bench/files.py FOLDER [--size 1024] [--rounds 9] [--threads 16] [--checksums] [--json OUT]

Each moves the same bytes past the page cache in pieces of 1 MiB, over files of `--size` MiB that were written before:

read   all of it once
write  all of it once
update an optimizer's: each byte is read and written once, the next slab is read while the last is written

Ways take turns, round by round, and the order turns too. fio runs with as many threads of pread and pwrite (psync),
with as many transfers of one thread in flight (libaio), and so with its buffers in huge pages, as dsx's are (libaio
huge).

GB/s     median of the rounds
of fio   median, over the rounds, of dsx's rate by that of fio, of its ways the one with the higher median; the
         least and the greatest in brackets
CPU      seconds of processor time for each GB, of dsx
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from dsx_kernels.aio import Files
from dsx_kernels.aio.speed import Speed

Way = Callable[[], float]
MIB = 1 << 20

DIRECTIONS = {"read": "read", "write": "write", "update": "rw"}
"""Of dsx and of fio."""

FIO = ("psync", "libaio", "libaio huge")


def fio(file: Path, size: int, direction: str, way: str, count: int) -> float:
    """GB/s of reads and writes together, by fio's own clock."""
    engine, _, huge = way.partition(" ")
    command = ["fio", "--name=dsx", f"--filename={file}", "--direct=1", "--bs=1M", f"--rw={direction}", "--thread"]
    if engine == "psync":
        share = size // count // MIB * MIB
        command += [f"--numjobs={count}", f"--size={share}", f"--offset_increment={share}", "--group_reporting"]
    else:
        command += [f"--iodepth={count}", f"--size={size}"]
    command += [f"--ioengine={engine}", "--output-format=json", "--randrepeat=0", "--refill_buffers=0"]
    if direction == "rw":
        command += ["--rwmixread=50", "--loops=2"]
    tunables = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if huge else {}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | tunables)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    milliseconds = max(job[way]["runtime"] for way in ("read", "write"))
    moved = sum(job[way]["io_bytes"] for way in ("read", "write"))
    return float(moved / milliseconds / 1e6)


def measure(folder: Path, choices: argparse.Namespace) -> list[dict[str, Any]]:
    """One record for each direction."""
    size = choices.size * MIB
    files = Files(folder, size, threads=choices.threads, checksums=choices.checksums)
    if not all(files.direct):
        print(f"{folder}: the page cache is in the way, and figures are of memory")
    dsx, file = Speed(files), folder / "fio"
    fio(file, size, "write", "psync", choices.threads)
    dsx.write()
    records = []
    for direction, name in DIRECTIONS.items():
        walk: Way = getattr(dsx, direction)
        processor: list[float] = []

        def own(walk: Way = walk, processor: list[float] = processor) -> float:
            before, counts = time.process_time(), files.counts
            rate = walk() / 1e9
            moved = sum(files.counts[:2]) - sum(counts[:2])
            processor.append((time.process_time() - before) / moved * 1e9)
            return rate

        others = {f"fio {way}": partial(fio, file, size, name, way, choices.threads) for way in FIO}
        found = rounds_of({"dsx": own, **others}, choices.rounds)
        records.append({"direction": direction, **found, "processor": median(processor)})
    files.close()
    return records


def rounds_of(ways: Mapping[str, Way], rounds: int) -> dict[str, Any]:
    """Rates of each way, and dsx's share of the best of the others, round by round."""
    names = list(ways)
    rates: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            rates[name].append(ways[name]())
    best = max(names[1:], key=lambda name: median(rates[name]))
    shares = [own / other for own, other in zip(rates["dsx"], rates[best], strict=True)]
    return {"rates": rates, "shares": shares}


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table."""
    names = list(records[0]["rates"])
    lines = [
        f"| | {' | '.join(f'{name}, GB/s' for name in names)} | of fio | CPU, s/GB |",
        "|---" * (len(names) + 3) + "|",
    ]
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
    parser.add_argument("--threads", type=int, default=16)
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
