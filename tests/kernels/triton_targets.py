"""Triton kernels compiled ahead of time for GPUs that are not here, and what they take of each.

    python -m kernels.triton_targets [--write]      compares with registers.json, or writes it

An implementation runs up to the start of its kernel; in place of that, what would be started is compiled.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from unittest import mock

import triton

from dsx_kernels.triton_blocks import BLOCK
from kernels import triton_attention_targets
from kernels.cases import call
from kernels.registers import WANTED, Table, conclude, wanted
from kernels.triton_compile import TARGETS, Launch, compiled


def launches(operation: str) -> Iterator[tuple[str, Launch]]:
    """The dtypes in words, and what is started for them."""
    module = import_module(f"dsx_kernels.{operation}.triton_{operation}")
    for words, case in wanted(operation):
        with mock.patch.object(module, "launch") as launch:
            call(getattr(module, operation), case, case.make())
        (kernel, _, *arguments), constants = launch.call_args
        constants["BLOCK"] = constants.pop("block", BLOCK)
        yield words, Launch(kernel, tuple(arguments), constants)


def table() -> Table:
    """Every kernel on every target."""
    operations: Mapping[str, Callable[[], Iterator[tuple[str, Launch]]]] = {
        **{operation: partial(launches, operation) for operation in WANTED},
        "block_attention": triton_attention_targets.launches,
    }
    return {
        operation: {words: {target: compiled(launch, target) for target in TARGETS} for words, launch in made()}
        for operation, made in operations.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    return conclude("triton", triton.__version__, table(), parser.parse_args().write)


if __name__ == "__main__":
    sys.exit(main())
