"""Layouts of dsx against DDP, ZeroRedundancyOptimizer, FSDP2 and DeepSpeed: time, memory and bytes of a step.

    python tests/bench/partition.py [--systems dsx-zero1,fsdp2] [--size 25M] [--dtype bf16] [--nproc 4]
        [--accumulation 4] [--rounds 20] [--sockets] [--link 400] [--latency 1] [--peers-python PATH] [--json OUT]
        [--plot FOLDER]

Every system trains the same GPT from the same weights on the same batches with AdamW, in processes of its own. They
take turns, one at a time, in an order that turns too; the others are stopped. A turn is two steps in a row, of which
the second is measured, from the end of the first to its own: what a system puts off until its next step is neither
given away nor charged twice. Losses are compared in every step; a system that trains something else, ends or hangs is
reported, and the others go on. Systems that do not all fit into memory are measured in groups, each with DDP.

time / DDP's  of a step, in the same round: median and quartiles; "DDP again" should read 1.00
CPU ms        of a step, of all threads of a rank
steady MB     resident between steps; "peak" within one, "start" until the end of the first; "held" once the allocator
              has given back, at the end, what is free, and without pages of files; all above that of imports
sent MB       leaves a rank in a step, headers included; measured where a network namespace can be made
first step s  from the start of the processes to the end of the first step
loss apart    the largest difference from DDP's

On one host dsx reads the memory of other ranks, for which nothing leaves; with --sockets it sends, as the others do.
With --link each rank is in a network namespace of its own, as on a host of its own: they are joined by a link of so
many Mbit/s, and dsx sends. With --latency everything on that link arrives so many milliseconds later.
Those with states on the host or in files (in the folder DSX_BENCH_DISK) or 1-bit updates are measured when named.
DeepSpeed is left out unless --peers-python names an interpreter that has it, torch, numpy and attrs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

from partition_systems.case import SIZES, Case
from partition_systems.catalogue import DEEPSPEED, SYSTEMS, UNASKED
from partition_systems.fleet import SystemFailed
from partition_systems.measure import Bench, measure, to_stderr
from partition_systems.network import Host, isolate, linked
from partition_systems.report import Result, plots, table


def main() -> int:
    choices = _parser().parse_args()
    isolated = isolate()
    apart = choices.link is not None or choices.latency > 0
    if apart and not isolated:
        raise SystemExit("--link and --latency need network namespaces: Linux, unshare, ip, and the right to use them")
    sockets = choices.sockets or apart
    case = Case(choices.size, choices.dtype, choices.nproc, choices.accumulation)
    folder = Path(tempfile.mkdtemp(prefix="dsx_bench_"))
    with linked(choices.link or 0, choices.latency) if apart else nullcontext([Host(os.getpid())]) as hosts:
        bench = Bench(case, hosts, isolated, sys.executable, choices.peers_python or sys.executable, folder, sockets)
        try:
            systems = measure(bench, choices.systems or _default(choices.peers_python), choices.rounds, to_stderr)
        except SystemFailed as error:
            text = f"\nDDP failed, with which all are compared: {error}\nwhat ranks wrote is in {folder}"
            raise SystemExit(text) from None
    setting = {"link": choices.link, "latency": choices.latency, "sockets": sockets, "rounds": choices.rounds}
    result = {"case": asdict(case), **setting, "systems": systems}
    to_stderr("")
    return _report(result, choices, folder)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", type=_names, help=f"of {', '.join(SYSTEMS)}; DDP is always there")
    parser.add_argument("--size", choices=SIZES, default="25M")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--sockets", action="store_true")
    parser.add_argument("--link", type=int, metavar="MBIT")
    parser.add_argument("--latency", type=float, default=0.0, metavar="MS")
    parser.add_argument("--peers-python", metavar="PATH", type=_interpreter)
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--plot", type=Path, metavar="FOLDER")
    return parser


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in SYSTEMS]:
        raise argparse.ArgumentTypeError(f"no system is called {unknown[0]!r}; there are {', '.join(SYSTEMS)}")
    return names


def _interpreter(path: str) -> str:
    if not os.access(path, os.X_OK):
        raise argparse.ArgumentTypeError(f"{path} is no program; name the python of an environment with DeepSpeed")
    return os.path.abspath(path)  # the link itself: an environment is known by it


def _default(peers: str | None) -> list[str]:
    usual = [name for name in SYSTEMS if name not in UNASKED]
    return [name for name in usual if peers or SYSTEMS[name].module != DEEPSPEED]


def _report(result: Result, choices: argparse.Namespace, folder: Path) -> int:
    """Print, write and draw; 1, and the ranks' outputs are kept, if a system failed."""
    print(table(result), flush=True)
    if choices.json:
        choices.json.write_text(json.dumps(result))
    if choices.plot:
        print("\n".join(str(file) for file in plots([result], choices.plot)))
    if any("failed" in record for record in result["systems"].values()):
        print(f"what ranks wrote is in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
