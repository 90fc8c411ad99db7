"""What public functions demand of their tensors."""

from __future__ import annotations

from torch import Tensor


def same_slices(operation: str, first: Tensor, **others: Tensor | None) -> None:
    """`ValueError` unless all tensors are contiguous, and have the device and number of elements of the first."""
    for name, tensor in {"the first tensor": first, **others}.items():
        if tensor is None:
            continue
        if not tensor.is_contiguous():
            raise ValueError(
                f"{operation}: {name} is not contiguous: strides {tensor.stride()} for {list(tensor.shape)}"
            )
        if tensor.numel() != first.numel():
            raise ValueError(f"{operation}: {name} has {tensor.numel()} elements, the first tensor {first.numel()}")
        if tensor.device != first.device:
            raise ValueError(f"{operation}: {name} is on {tensor.device}, the first tensor on {first.device}")
