"""What `dsx plan` says against what runs take: model states, memory of the process, bytes sent.

    python tests/bench/plan.py [MANIFEST ...] [--set KEY=VALUE ...] [--worlds 1,2,4] [--layouts replicated,zero1,...]

For every manifest (those in docs/manifests), layout and number of ranks: the run is made for real, each rank in a fresh
process, for some updates; and planned.

states     real bytes of parameters, gradients, masters and optimizer states / planned
process    planned resident size above that after the imports / the real most; "MB" is the real one
sent       real bytes by purpose equal to the planned ones, in the second update
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
UPDATES = 4
LAYOUTS = ("replicated", "zero1", "zero2", "zero3")


def main() -> int:
    choices = _parser().parse_args()
    print(f"{'manifest':16} {'layout':12} {'ranks':>5} {'states':>8} {'process':>8} {'MB':>8}  sent")
    worst = 0.0
    for path in choices.manifests or sorted((ROOT / "docs" / "manifests").glob("*.toml")):
        for layout in choices.layouts.split(","):
            partition = "[]" if layout == "replicated" else f"['{layout}']"
            settings = [*choices.set, f"partition.use={partition}"]
            for world in map(int, choices.worlds.split(",")):
                states, process, resident, sent = compare(str(path), settings, world)
                worst = max(worst, abs(process - 1))
                equal = "equal" if sent else "DIFFERS"
                name = f"{path.stem:16} {layout:12} {world:5}"
                print(f"{name} {states:8.4f} {process:8.3f} {resident / 1e6:8.0f}  {equal}", flush=True)
    print(f"\nprocess at most {worst:.1%} off")
    return 0


def compare(path: str, settings: list[str], world: int) -> tuple[float, float, int, bool]:
    """(real states / planned, planned process / real, real process, whether the bytes sent are equal)."""
    import dsx
    from dsx.plan.resident import RESIDENT

    plan = dsx.forecast(None, path, set=settings, world=world).rehearsal
    real = _run(path, settings, world)
    held = max(each["states"] for each in real)
    resident = max(each["process"] for each in real)
    sent = {purpose: count for purpose, count in plan.work.sent.items() if count}
    return (
        held / sum(plan.states.values()),
        RESIDENT["cpu"].total(plan) / resident,
        resident,
        {purpose: count for purpose, count in real[0]["sent"].items() if count} == sent,
    )


def _run(path: str, settings: list[str], world: int) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    ranks = [context.Process(target=_rank, args=(rank, world, port, path, settings, queue)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    results = dict(queue.get(timeout=600) for _ in ranks)
    for rank in ranks:
        rank.join()
    return [results[rank] for rank in range(world)]


def _rank(rank: int, world: int, port: int, path: str, settings: list[str], queue: Any) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import torch
    import torch._dynamo  # the first use of an optimizer imports it
    import torch.distributed as dist

    import dsx
    from dsx.manifest import Manifest
    from dsx.registry import Registry
    from dsx.resolve import resolve
    from dsx.run.data import Batches
    from dsx.run.targets import make, make_model
    from dsx.testing import CountingPlugin

    torch.set_num_threads(1)
    settings = [*settings, "communicate.use=['counting']"]
    counting = {"counting": CountingPlugin()}
    manifest = Manifest.load(path, set=settings)
    resolve(manifest, Registry.scan(counting))
    source = make(manifest.data, "data.source")
    if world > 1:
        dist.init_process_group("gloo")
    before = _resident()["VmRSS"]
    cpu = torch.device("cpu")
    engine = dsx.prepare(make_model(manifest.model, cpu), manifest, plugins=counting)
    batch = manifest.resolve_batch(world)
    batches = Batches(
        source, micro=batch.micro, accumulation=batch.accumulation, rank=rank, world=world, seed=0, device=cpu
    )
    transport: Any = engine.program.transport
    sent: dict[str, int] = {}
    for update in range(UPDATES):
        transport.reset()
        engine.train_step(batches.update(update))
        if update == 1:
            sent = dict(transport.bytes)
    layout = {name: size for name, size in engine.program.layout.bytes().items() if name != "buffer"}
    states = sum(engine.program.store.bytes().values()) + sum(layout.values())
    queue.put((rank, {"states": states, "process": _resident()["VmHWM"] - before, "sent": sent}))
    engine.close()


def _resident() -> Mapping[str, int]:
    return dict(_lines())


def _lines() -> Iterator[tuple[str, int]]:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if rest.endswith("kB"):
            yield name, int(rest.split()[0]) * 1024


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("manifests", nargs="*", type=Path, metavar="MANIFEST")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--worlds", default="1,2,4")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    return parser


if __name__ == "__main__":
    sys.exit(main())
