"""Parameters that are two objects over one memory: they would be trained apart."""

from __future__ import annotations

from itertools import pairwise

import torch
from attrs import frozen
from torch import Tensor, nn

from dsx.errors import DsxError


def refuse_shared(model: nn.Module) -> None:
    """Raise `DsxError` for two parameters that are different objects and have memory in common."""
    with torch._C.DisableTorchFunctionSubclass():  # an earlier engine may have left parameters without memory
        extents = sorted(extent for name, p in model.named_parameters() if (extent := _Extent.of(name, p)) is not None)
    for first, second in pairwise(extents):
        if first.meets(second):
            raise DsxError(
                f"the parameters '{first.name}' and '{second.name}' share memory, but are different objects",
                expected="one nn.Parameter with both names, or memory of their own",
                remedy="to tie them, assign the object itself, as in `head.weight = embedding.weight`, not its `.data`",
            )


@frozen(order=True)
class _Extent:
    """The bytes from the first to the last element of a parameter, in its storage."""

    storage: int
    start: int
    stop: int
    strides: tuple[int, ...]
    packed: bool
    name: str

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> _Extent | None:
        """None where there is no memory."""
        if tensor.layout != torch.strided or tensor.numel() == 0 or tensor.untyped_storage().nbytes() == 0:
            return None
        size = tensor.element_size()
        length = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = int(tensor.storage_offset()) * size
        packed = length == tensor.numel()
        return cls(tensor.untyped_storage()._cdata, start, start + length * size, tensor.stride(), packed, name)

    def meets(self, other: _Extent) -> bool:
        """Whether an element of one is surely one of the other too; those that lie in each other's gaps are apart."""
        if self.storage != other.storage or other.start >= self.stop:
            return False
        return (self.start, self.strides) == (other.start, other.strides) or (self.packed and other.packed)
