"""The public functions: they pass everything on, and refuse tensors that do not fit together."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from dsx.errors import KernelUnavailable
from dsx_kernels.accumulate import accumulate
from dsx_kernels.cast import cast
from dsx_kernels.found import names
from dsx_kernels.squares import squares
from kernels.cases import TABLE, check


@pytest.mark.parametrize("operation", TABLE)
def test_the_public_function_is_the_reference(operation: str) -> None:
    function = getattr(import_module(f"dsx_kernels.{operation}"), operation)
    for case in TABLE[operation][-12:]:
        check(function, case)


@pytest.mark.parametrize("operation", TABLE)
def test_the_reference_is_its_own_float64(operation: str) -> None:
    """The reference is what runs where nothing else does: its fp32 must be near, too."""
    function = getattr(import_module(f"dsx_kernels.{operation}.reference"), operation)
    for case in TABLE[operation]:
        check(function, case)


def test_every_operation_has_cases() -> None:
    """Here or, if it is not elementwise, in tests of its own."""
    assert set(names()) == {*TABLE, "block_attention"}


def test_tensors_of_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="cast: target has 3 elements, the first tensor 4"):
        cast(torch.zeros(4), torch.zeros(3))


def test_tensors_that_are_not_contiguous_are_refused() -> None:
    with pytest.raises(ValueError, match=r"accumulate: source is not contiguous: strides \(2,\) for \[4\]"):
        accumulate(torch.zeros(4), torch.zeros(8)[::2])


def test_tensors_of_another_device_are_refused() -> None:
    with pytest.raises(ValueError, match="accumulate: source is on meta, the first tensor on cpu"):
        accumulate(torch.zeros(4), torch.zeros(4, device="meta"))


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.float8_e5m2])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(KernelUnavailable, match="squares has no implementation for"):
        squares(torch.zeros(4, dtype=dtype))
