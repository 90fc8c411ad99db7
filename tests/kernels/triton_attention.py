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

from kernels.attention_cases import BF16, CASES, F16, F32, Case, check


def cases() -> Iterator[Case]:
    """The table's, but for the long ones, in fp32; and a few in 16 bits."""
    small = [case for case in CASES if max(case.queries, case.keys) <= 300 and case.dim <= 160]
    yield from small
    for case in small[2:-4:3]:
        yield replace(case, dtype=BF16)
        yield replace(case, dtype=F16)


def main() -> int:
    if os.environ.get("TRITON_INTERPRET") != "1":
        sys.exit("set TRITON_INTERPRET=1")
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # of integers that wrap, as a hash wants
    from kernels.triton_interpreter import install

    install()
    from dsx_kernels.block_attention.triton_engine import ENGINE

    assert F32 in {case.dtype for case in cases()}
    failures, count = [], 0
    for case in cases():
        count += 1
        try:
            check(ENGINE, case)
        except Exception as error:
            failures.append(f"{case}: {type(error).__name__}: {error}")
    print("\n".join(failures))
    print(f"{count - len(failures)} of {count} cases of block_attention passed")
    return 1 if failures else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
