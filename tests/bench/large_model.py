"""A model that is too large to be whole: built, saved and exported in shards, within the memory that `dsx plan` says.

    python tests/bench/large_model.py [--layers 24] [--width 2048] [--world 2] [--out FOLDER]

A GPT of 1.2 billion fp32 parameters (4.8 GB) by default, under zero3. Resident memory of each rank, above that after
the imports, until the end of each step; the limit is what the plan says of model states, plus the two largest units,
plus 10 %. No update is made. Needs 16 GB of memory and 25 GB of disk. Exit code 1 where a rank, or the process that
exports the checkpoint, exceeds the limit.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MANIFEST: dict[str, Any] = {"partition": {"use": ["zero3"]}, "optimize": {"use": ["adamw"]}}


def main() -> int:
    choices = _parser().parse_args()
    import dsx
    from dsx_text import gpt

    shape = {"layers": choices.layers, "width": choices.width, "heads": choices.width // 64, "vocab": 256}
    plan = dsx.forecast(lambda: gpt(**shape), MANIFEST, world=choices.world)
    states = sum(plan.rehearsal.states.values())
    folder = Path(tempfile.mkdtemp(prefix="dsx_large_", dir=choices.out))
    try:
        units = _two_largest(shape)
        limit = 1.1 * (states + units)
        parts = f"{states / 1e9:.2f} GB of states and {units / 1e9:.2f} of two units a rank"
        print(f"{plan.parameters:,} parameters, {parts}: limit {limit / 1e9:.2f} GB", flush=True)
        results = _ranks(choices.world, shape, str(folder))
        most = max(size for rank in results for _, _, size in rank)
        for step in zip(*results, strict=True):
            sizes = ", ".join(f"{size / 1e9:.2f}" for _, _, size in step)
            print(f"  {step[0][0]:28} {step[0][1]:6.1f} s   {sizes} GB at most so far", flush=True)
        alone = _export(folder)
        print(f"  export of the checkpoint, alone: {alone / 1e9:.3f} GB, limit {1.1 * units / 1e9:.3f}")
        same = _same(folder / "live", folder / "exported")
        print(f"  exported from the engine and from the checkpoint: {'equal, byte for byte' if same else 'DIFFERENT'}")
        return int(most > limit or alone > 1.1 * units or not same)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _two_largest(shape: dict[str, Any]) -> int:
    import torch

    from dsx_text import gpt

    with torch.device("meta"):
        model = gpt(**shape)
    blocks = sorted(4 * sum(p.numel() for p in block.parameters()) for block in model.blocks)
    return sum(blocks[-2:])


def _ranks(world: int, shape: dict[str, Any], folder: str) -> list[list[tuple[str, float, int]]]:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    ranks = [context.Process(target=_rank, args=(rank, world, port, shape, folder, queue)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    results: dict[int, list[tuple[str, float, int]]] = {}
    while len(results) < world:
        rank, steps = queue.get(timeout=3600)
        results[rank] = steps
    for process in ranks:
        process.join()
    return [results[rank] for rank in range(world)]


def _rank(rank: int, world: int, port: int, shape: dict[str, Any], folder: str, queue: Any) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import torch
    import torch._dynamo
    import torch.distributed as dist
    import torch.distributed.checkpoint

    import dsx
    from dsx_text import gpt

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    before, started, steps = _status("VmRSS"), time.perf_counter(), []

    def note(what: str) -> None:
        steps.append((what, time.perf_counter() - started, _status("VmHWM") - before))

    torch.manual_seed(7)
    with dsx.empty_init():
        model = gpt(**shape)
    note("built without memory")
    engine = dsx.prepare(model, MANIFEST)
    note("materialised in shards")
    engine.save(Path(folder, "checkpoint"))
    note("saved")
    engine.export(Path(folder, "live"))
    note("exported")
    queue.put((rank, steps))
    engine.close()


def _export(folder: Path) -> int:
    """What a process of its own takes to export the checkpoint, above what its imports do."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_exporter, args=(str(folder), queue))
    process.start()
    found: int = queue.get(timeout=3600)
    process.join()
    return found


def _exporter(folder: str, queue: Any) -> None:
    import torch
    import torch.distributed.checkpoint  # noqa: F401

    import dsx

    export = dsx.export
    before = _status("VmRSS")
    export(Path(folder, "checkpoint"), Path(folder, "exported"))
    queue.put(_status("VmHWM") - before)


def _same(first: Path, second: Path) -> bool:
    names = sorted(path.name for path in first.glob("*.safetensors"))
    if not names or names != sorted(path.name for path in second.glob("*.safetensors")):
        return False
    return all(_equal(first / name, second / name) for name in names)


def _equal(first: Path, second: Path) -> bool:
    with first.open("rb") as one, second.open("rb") as other:
        while block := one.read(1 << 24):
            if block != other.read(1 << 24):
                return False
        return not other.read(1)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--out", type=Path, help="where the files go; default: the folder for temporary files")
    return parser


if __name__ == "__main__":
    sys.exit(main())
