"""Every pattern by one implementation, against dense attention with the pattern's explicit mask in float64.

    python -m kernels.attention_patterns native|reference
    TRITON_INTERPRET=1 python -m kernels.attention_patterns triton

Lengths 1 to 4,097, fp32 and bf16, two query heads of one key head, strided tensors, key padding that leaves some rows
without keys; native at every instruction level that the processor has. Output, log-sum-exp and all gradients. Prints
what is off, and each pattern that is done; exit code 1 if any is off. At 4,097 tokens two sequences take some GB.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module

import torch
from attrs import evolve

from dsx_kernels import library
from dsx_kernels.block_attention import BlockLayout
from dsx_sparse import document
from dsx_sparse.layout import layout
from dsx_sparse.region import Shape
from kernels.attention_cases import BF16, F32, Case, check
from sparse_patterns import PATTERNS

LENGTHS = (1, 17, 128, 1000, 1025, 4097)
ALL = {**PATTERNS, "document": document.Options(block=16)}
ENGINES = {"native": "native", "reference": "reference", "triton": "triton_engine"}


@dataclass(frozen=True)
class PatternCase(Case):
    """A call whose layout is a pattern's."""

    pattern: str = "dense"

    def layout(self) -> BlockLayout:
        pattern = evolve(ALL[self.pattern], block=self.block)
        shape = Shape(self.heads, self.queries, self.keys, self.block, causal=True)
        documents = torch.arange(self.keys).expand(self.batch, -1) // 61 if pattern.segmented else None
        return layout(shape, pattern.region(shape), documents)


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1] not in ENGINES:
        sys.exit(__doc__)
    if sys.argv[1] == "triton":
        if os.environ.get("TRITON_INTERPRET") != "1":
            sys.exit("set TRITON_INTERPRET=1")
        warnings.filterwarnings("ignore", category=RuntimeWarning)  # of integers that wrap, as a hash wants
        from kernels.triton_interpreter import install

        install()
    module = import_module(f"dsx_kernels.block_attention.{ENGINES[sys.argv[1]]}")
    levels: tuple[str | None, ...] = (None,)
    if sys.argv[1] == "triton":  # the interpreter's time is the number of tiles
        module._tiles = lambda q, call: (call.layout.block, call.layout.block)
    if sys.argv[1] == "native":
        levels = library.LEVELS[: library.LEVELS.index(library.best()) + 1]
    bad = 0
    for name in ALL:
        since = time.monotonic()
        for length in LENGTHS:
            shape = {"queries": length, "keys": length, "block": 16 if length < 1000 else 128}
            for dtype in (F32, BF16):
                case = PatternCase(**shape, batch=2, key_heads=1, dtype=dtype, padding=True, strided=True, pattern=name)
                for level in levels:
                    try:
                        with library.using(level) if level else nullcontext():
                            check(module.ENGINE, case)
                    except AssertionError as error:
                        bad += 1
                        print(f"{level or sys.argv[1]}: {error}")
        print(f"{name} ({time.monotonic() - since:.0f} s)", flush=True)
    print(f"{bad} failed" if bad else f"{len(ALL)} patterns of {len(LENGTHS)} lengths passed")
    return 1 if bad else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
