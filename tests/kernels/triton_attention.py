"""`block_attention` by Triton's interpreter: `TRITON_INTERPRET=1 python -m kernels.triton_attention`.

A process of its own, since Triton decides at its import whether it interprets. Prints what fails, and how many passed;
exit code 1 if any failed.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from dsx_kernels.block_attention.engine import Call
from kernels.attention_cases import BF16, CASES, F16, Case, check


def cases() -> Iterator[Case]:
    """Of the table in fp32 what is small, one of each rule; and a few in 16 bits."""
    small = [case for case in CASES if max(case.queries, case.keys) <= 200 and case.dim <= 72]
    seen = set[tuple[object, ...]]()
    for case in small:
        rules = (case.padding, case.bias is not None, case.segments, case.bits, case.mixed, case.strided, case.dropout)
        if rules not in seen or case.dim in (33, 72):
            seen.add(rules)
            yield case
    yield replace(small[1], dtype=BF16, heads=2, key_heads=1)
    yield replace(small[1], dtype=F16)


def _whole_blocks(q: Tensor, call: Call) -> tuple[int, int]:
    return call.layout.block, call.layout.block


def main() -> int:
    if os.environ.get("TRITON_INTERPRET") != "1":
        sys.exit("set TRITON_INTERPRET=1")
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # of integers that wrap, as a hash wants
    from kernels.triton_interpreter import install

    install()
    from dsx_kernels.block_attention import triton_engine

    failures, count, tiles = [], 0, triton_engine._tiles
    for case in cases():
        count += 1
        # The interpreter's time is the number of tiles: all but a few cases have whole blocks.
        triton_engine._tiles = tiles if count % 5 == 1 else _whole_blocks
        try:
            check(triton_engine.ENGINE, case)
        except Exception as error:
            failures.append(f"{case}: {type(error).__name__}: {error}")
    print("\n".join(failures))
    print(f"{count - len(failures)} of {count} cases of block_attention passed")
    return 1 if failures else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
