"""Ranks that would train different things find out before the first step."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dsx.contracts import Transport
from dsx.errors import RankMismatch
from dsx.raw import raw

_BYTES = 16


def agree(transport: Transport, device: torch.device, texts: Mapping[str, str]) -> None:
    """Compare texts across ranks by their digests.

    texts  by what they describe: "manifest", "plugins", "model"
    Raises `RankMismatch` on all ranks, naming what differs and the ranks that differ from rank 0.
    """
    digest = b"".join(hashlib.sha256(text.encode()).digest()[:_BYTES] for text in texts.values())
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    every = torch.empty(transport.world * len(digest), dtype=torch.uint8, device=device)
    transport.all_gather(every, mine, channel="admin", purpose="admin").wait()
    rows = every.view(transport.world, len(texts), _BYTES).cpu()
    differ = (rows != rows[0]).any(-1)
    for number, name in enumerate(texts):
        if odd := differ[:, number].nonzero().flatten().tolist():
            raise RankMismatch(
                f"the ranks do not have the same {name}",
                ranks=odd,
                found=f"rank {', '.join(map(str, odd))} differ{'s' if len(odd) == 1 else ''} from rank 0",
                remedy=_REMEDIES.get(name),
            )


_REMEDIES = {
    "manifest": "give every rank the same manifest and --set options",
    "plugins": "install the same packages, in the same versions, on every host",
    "model": "build the same model on every rank: names, shapes, dtypes and requires_grad of its parameters",
    "source of weights": "on every rank build it within dsx.empty_init() or on none, and give the same weights=",
}


def alike(transport: Transport, tensor: Tensor) -> bool:
    """Whether a tensor [size] has the same bits on all ranks; entered by all of them."""
    if transport.world == 1:
        return True
    digest = hashlib.sha256()
    for start in range(0, tensor.numel(), _PART):
        part = tensor[start : start + _PART].cpu()
        digest.update(raw(part))
    mine = torch.tensor(list(digest.digest()), dtype=torch.uint8, device=tensor.device)
    every = torch.empty(transport.world * len(mine), dtype=torch.uint8, device=tensor.device)
    transport.all_gather(every, mine, channel="admin", purpose="admin").wait()
    return bool((every.view(transport.world, -1) == mine).all())


_PART = 1 << 24
"""Elements that are brought to the host at a time."""


def describe(model: nn.Module) -> str:
    """What of a model must be the same on all ranks, as text."""
    parameters = [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in model.named_parameters()]
    return repr((parameters, [(name, tuple(b.shape), str(b.dtype)) for name, b in model.named_buffers()]))
