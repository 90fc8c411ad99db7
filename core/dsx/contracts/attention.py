"""Role `attention`: computes attention at the sites it claims. Many claims; a site claimed twice is a conflict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional

from dsx.errors import DsxError


class Attend(Protocol):
    """Attention of one module: softmax(q k^T * scale + mask) v.

    q         [batch, heads, query tokens, head_dim]
    k, v      [batch, key heads, key tokens, head_dim]; heads is a multiple of key heads
    mask      broadcastable to [batch, heads, query tokens, key tokens]: boolean, True = may attend; or floating, added
              to the scores
    causal    the last query sees every key, the one before it one less, and so on: query i sees the keys up to
              i + key tokens - query tokens
    dropout   probability at which attention weights are dropped
    scale     None: 1 / sqrt(head_dim)
    segments  integers [batch, key tokens]: tokens of one number are a sequence of their own, and see no other; the
              queries are the last of these tokens. None: one sequence
    returns   [batch, heads, query tokens, head_dim]; zeros where a query may attend to nothing

    Raises `DsxError` for what it does not compute: never silently something else.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        *,
        causal: bool = False,
        dropout: float = 0.0,
        scale: float | None = None,
        segments: Tensor | None = None,
    ) -> Tensor: ...


Undo = Callable[[], None]


@frozen(eq=False)
class Site:
    """A module that computes attention in a way that can be replaced.

    name   of the module in the model
    kind   how it computes attention, for people: "calls its attribute `attend`"
    place  gives the module an `Attend` of its own; returns what takes it away again. Raises `DsxError` where the module
           turns out to do what an `Attend` cannot
    """

    name: str
    module: nn.Module
    kind: str
    place: Callable[[Attend], Undo]


class Attention:
    """The null part: claims nothing, so every module keeps its own attention."""

    def claim(self, site: Site) -> bool:
        """Whether this part computes attention at `site`; asked once, at set-up."""
        return False

    def bind(self, site: Site) -> Attend:
        """The function of a claimed site: that module's own from now on, no ambient state."""
        raise NotImplementedError


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
    segments: Tensor | None = None,
) -> Tensor:
    """The `Attend` of torch: `scaled_dot_product_attention`, with a mask where it has no other words for it."""
    check_mask(mask, q, k)
    queries, keys = q.shape[2], k.shape[2]
    if segments is not None:
        same = segments[:, None, keys - queries :, None] == segments[:, None, None, :]
        mask = joined(mask, same)
    if causal and (mask is not None or queries != keys):
        mask, causal = joined(mask, _earlier(queries, keys, q.device)), False
    grouped = k.shape[1] < q.shape[1]
    return functional.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=grouped)


def joined(mask: Tensor | None, allowed: Tensor) -> Tensor:
    """A mask, and True where a pair may attend besides."""
    if mask is None:
        return allowed
    return mask & allowed if mask.dtype == torch.bool else mask.masked_fill(~allowed, float("-inf"))


def _earlier(queries: int, keys: int, device: torch.device) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def check_mask(mask: Tensor | None, q: Tensor, k: Tensor) -> None:
    """Raise `DsxError` for a mask of another dtype or shape than `Attend` says."""
    if mask is None:
        return
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise DsxError(
            f"an attention mask has dtype {str(mask.dtype).removeprefix('torch.')}",
            expected="boolean, True = may attend; or floating, added to the scores",
            remedy="mask.bool() for a mask of 1 and 0",
        )
    wanted = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    given = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if len(given) != 4 or any(have not in (1, want) for have, want in zip(given, wanted, strict=True)):
        raise DsxError(
            f"an attention mask has shape {list(mask.shape)}",
            expected=f"one that broadcasts to [batch, heads, queries, keys] = {list(wanted)}",
            remedy="give a mask of keys alone, [batch, keys], as mask[:, None, None, :]",
        )
