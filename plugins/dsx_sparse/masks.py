"""What the operation takes a call's mask for."""

from __future__ import annotations

import torch
from torch import Tensor

from dsx.contracts import check_mask


def padding_and_bias(mask: Tensor | None, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """A boolean mask that is alike for all heads and queries, as one of keys, bool [batch, keys]; any other, as what is
    added to the scores, -inf where a pair may not attend. It counts within the pattern's blocks, nothing else is
    computed. Raises `DsxError` as `Attend` says."""
    check_mask(mask, q, k)
    if mask is None:
        return None, None
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.is_floating_point():
        return None, mask
    if all(mask.shape[dim] == 1 or mask.stride(dim) == 0 for dim in (1, 2)):
        return mask[:, 0, 0].expand(k.shape[0], k.shape[2]), None
    return None, torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, float("-inf"))
