"""Whether dsx has a kernel of its own for a device."""

from __future__ import annotations

import torch

from dsx_kernels import available


def served(operation: str, device: torch.device) -> bool:
    """Whether an operation has more than its reference here, which is plain torch and slower than torch's fused one."""
    return any(
        found.name != "reference" and found.missing is None and device.type in found.devices
        for found in available(operation)
    )
