"""Block-sparse attention against dense attention on the CPU: forward and backward, time and memory.

    python tests/bench/attention.py [--lengths 1024,4096] [--dtypes float32,bfloat16] [--ways dense,sparse] [--rounds 3]
                                    [--threads 1] [--no-memory] [--json FILE]

8 heads of 64, causal; ours sees a window of 4 blocks of 128 tokens and the first block. All ways take turns, round by
round, in one process; times are CPU time with one thread, else elapsed time, the least of the rounds, since what else
the machine does only ever adds. Memory is what one forward and backward adds to the peak resident size of a process of
its own. A way is left out at lengths where it is quadratic and would take minutes. `attention_report.py` makes tables
and plots of the files, to which rows are added: a measurement can be made in parts.

dense   scaled_dot_product_attention(is_causal=True)
mask    the same with a boolean mask of the pattern
eager   scores, softmax and products one after the other, with that mask
flex    FlexAttention with the pattern, compiled; forward only, since it has no backward on CPUs
ours    block_attention with every block of the causal triangle
sparse  block_attention with the pattern
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

HEADS, DIM, BLOCK, WINDOW = 8, 64, 128, 4
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
LONGEST: Mapping[str, int] = {
    "dense": 16384,
    "mask": 4096,
    "eager": 4096,
    "flex": 16384,  # its block mask is made by way of a mask of tokens
    "ours": 16384,
    "sparse": 1 << 30,
}
"""The longest sequence that each way is given."""

Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def blocks(length: int, dense: bool = False) -> Tensor:
    """[1, query blocks, key blocks]: a window and the first block, or all."""
    row, column = torch.arange(length // BLOCK)[:, None], torch.arange(length // BLOCK)
    return ((row - column < WINDOW) | (column == 0) | dense)[None]


def layout(length: int, dense: bool = False) -> Any:
    from dsx_kernels.block_attention import BlockLayout

    return BlockLayout.from_blocks(
        blocks(length, dense), block=BLOCK, query_len=length, key_len=length, heads=[0] * HEADS, causal=True
    )


def way_of(name: str, length: int) -> Way:
    """A way of attention for one length, with all that is made once."""
    from dsx_kernels.block_attention import block_attention

    if name == "dense":
        return lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True)
    if name == "mask":
        mask = layout(length).mask()[:1]
        return lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=mask)
    if name == "eager":
        hidden = ~layout(length).mask()[:1]
        return lambda q, k, v: (q @ k.mT / DIM**0.5).masked_fill(hidden, float("-inf")).softmax(-1) @ v
    if name == "flex":
        return _flex(length)
    made = layout(length, dense=name == "ours")
    return lambda q, k, v: block_attention(q, k, v, made)


def _flex(length: int) -> Way:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def rule(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & ((query // BLOCK - key // BLOCK < WINDOW) | (key < BLOCK))

    mask = create_block_mask(rule, None, None, length, length, device="cpu", BLOCK_SIZE=BLOCK)
    compiled = torch.compile(flex_attention)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


def tensors(length: int, dtype: torch.dtype, differentiable: bool) -> list[Tensor]:
    torch.manual_seed(0)
    made = [torch.randn(1, HEADS, length, DIM).to(dtype) for _ in range(4)]
    return [tensor.requires_grad_(differentiable) for tensor in made[:3]] + made[3:]


def step(way: Way, inputs: list[Tensor]) -> None:
    """Forward, and backward if inputs are differentiable."""
    out = way(*inputs[:3])
    if inputs[0].requires_grad:
        torch.autograd.grad(out, inputs[:3], inputs[3])


def times(names: Iterable[str], length: int, dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """Seconds of each way, the least of the rounds; a first one is not counted."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    ways = {name: (way_of(name, length), tensors(length, dtype, name != "flex")) for name in names}
    least = dict.fromkeys(ways, float("inf"))
    for number in range(rounds + 1):
        for name, (way, inputs) in ways.items():
            start = clock()
            step(way, inputs)
            if number:
                least[name] = min(least[name], clock() - start)
    return least


def memory(name: str, length: int, dtype: str) -> int:
    """Bytes that a step adds to the peak resident size, in a process of its own."""
    command = [sys.executable, __file__, "--peak", name, str(length), dtype]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def peak(name: str, length: int, dtype: torch.dtype) -> int:
    way, small = way_of(name, length), way_of(name, BLOCK)
    step(small, tensors(BLOCK, dtype, name != "flex"))  # what is loaded at the first call
    inputs = tensors(length, dtype, name != "flex")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status("VmRSS")
    step(way, inputs)
    return _status("VmHWM") - before


def _status(field: str) -> int:
    """Bytes by /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def measure(arguments: argparse.Namespace) -> None:
    for dtype in arguments.dtypes.split(","):
        for length in map(int, arguments.lengths.split(",")):
            here = [name for name in arguments.ways.split(",") if length <= LONGEST[name]]
            for name, seconds in times(here, length, getattr(torch, dtype), arguments.rounds).items():
                row = {"dtype": dtype, "length": length, "way": name, "threads": arguments.threads, "seconds": seconds}
                row["bytes"] = None if arguments.no_memory else memory(name, length, dtype)
                size = "" if row["bytes"] is None else f", {row['bytes'] / 2**20:.0f} MiB"
                print(f"{dtype}, {length} tokens, {name}: {seconds * 1e3:.1f} ms{size}", flush=True)
                if arguments.json:
                    keep(row, arguments.json)


def keep(row: Mapping[str, Any], file: Path) -> None:
    """Add a row to a file of them."""
    rows = json.loads(file.read_text()) if file.exists() else []
    file.write_text(json.dumps([*rows, row], indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--ways", default=",".join(LONGEST))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peak", nargs=3, metavar=("WAY", "LENGTH", "DTYPE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.peak:
        name, length, dtype = arguments.peak
        print(peak(name, int(length), getattr(torch, dtype)))
        return
    print(f"torch {torch.__version__}, {platform.machine()}, {arguments.threads} thread(s)")
    measure(arguments)


if __name__ == "__main__":
    main()
