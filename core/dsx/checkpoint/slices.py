"""A logical tensor of which this rank holds a slice, in the protocol of torch.distributed.checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dsx.checkpoint.boxes import Box, boxes
from dsx.checkpoint.lent import Values


class Slice(torch.Tensor):
    """Elements [start, start + held.size) of a tensor of `shape`, in memory order.

    It has the shape and dtype of the whole and no values of its own: the planner sees a tensor like any other, and gets
    rectangles of `held` without a copy, borrowed until its loans are given back.
    """

    held: Values
    start: int
    chunks: list[Box]

    @staticmethod
    def __new__(cls, held: Values, start: int, shape: torch.Size) -> Slice:
        made: Slice = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=held.dtype, device=torch.device("cpu"), requires_grad=False
        )
        return made

    def __init__(self, held: Values, start: int, shape: torch.Size) -> None:
        self.held, self.start = held, start
        self.chunks = boxes(shape, start, start + held.size)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} of a slice: only its rectangles have values")

    def __create_write_items__(self, fqn: str, obj: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.held.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets), number),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=_chunk(box), properties=properties, size=self.size()),
            )
            for number, box in enumerate(self.chunks)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box in self.chunks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        (box,) = [box for box in self.chunks if torch.Size(box.offsets) == (index.offset or torch.Size(()))]
        return self.held.tensor()[box.begin : box.begin + box.numel].view(box.sizes)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
