"""Buffers that stay for long: what they hold, and where they lie."""

from __future__ import annotations

import pytest
import torch

from dsx.contracts import comes_back, lasting
from dsx.contracts.memory import huge_pages

HUGE = 2 << 20


@pytest.mark.parametrize("count", [0, 7, 1 << 20, HUGE, 3 * HUGE + 12])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_is_zeros_that_can_be_written(count: int, dtype: torch.dtype) -> None:
    found = lasting(count // dtype.itemsize, dtype, torch.device("cpu"))
    assert (found.shape, found.dtype) == ((count // dtype.itemsize,), dtype)
    assert not found.any()
    found.fill_(3)
    assert (found == 3).all()


@pytest.mark.skipif(not huge_pages(), reason="the kernel has no huge pages")
def test_a_large_one_lies_where_huge_pages_can() -> None:
    found = lasting(HUGE, torch.float32, torch.device("cpu"))
    assert found.data_ptr() % HUGE == 0


@pytest.mark.parametrize(("device", "expected"), [("cpu", huge_pages()), ("meta", huge_pages()), ("cuda", False)])
def test_memory_is_cheap_on_hosts_with_huge_pages(device: str, expected: bool) -> None:
    assert comes_back(torch.device(device)) == expected
