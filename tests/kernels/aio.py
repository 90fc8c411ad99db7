"""What tests of the file engine share."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from dsx.errors import DsxError
from dsx_kernels.aio import Files, Ticket, aligned


def noise(nbytes: int, start: int = 0) -> Tensor:
    """Bytes at `start` of a page."""
    memory = aligned(nbytes + start)[start : start + nbytes]
    return memory.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8))


def replace(files: Files, device: str, number: int = 0) -> None:
    """Put a device, which fails by itself, in the place of an open file."""
    instead = os.open(device, os.O_RDWR)
    os.dup2(instead, files._engine._descriptors[number])
    os.close(instead)


def failing(ticket: Ticket) -> DsxError:
    """Its error, the same each time."""
    errors = []
    for _ in range(2):
        with pytest.raises(DsxError) as error:
            ticket.wait()
        errors.append(str(error.value))
    assert errors[0] == errors[1] and ticket.done()
    return error.value
