"""Role `attention`: computes attention at the sites it claims. Many claims; a site claimed twice is a conflict."""

from __future__ import annotations

from typing import Protocol

from attrs import frozen
from torch import Tensor, nn


class Attend(Protocol):
    """Attention of one module: softmax(q k^T * scale + mask) v.

    q         [batch, heads, query tokens, head_dim]
    k, v      [batch, key heads, key tokens, head_dim]; heads is a multiple of key heads
    mask      broadcastable to [batch, heads, query tokens, key tokens]: boolean, True = may attend; or additive
    causal    query t sees keys up to t
    dropout   probability at which attention weights are dropped
    scale     None: 1 / sqrt(head_dim)
    returns   [batch, heads, query tokens, head_dim]
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
    ) -> Tensor: ...


@frozen(eq=False)
class Site:
    """A module that calls its attribute `attend` (an `Attend`) to compute attention.

    name  of the module in the model
    """

    name: str
    module: nn.Module


class Attention:
    """The null part: claims nothing, so every module keeps its own attention."""

    def claim(self, site: Site) -> bool:
        """Whether this part computes attention at `site`; asked once, at set-up."""
        return False

    def bind(self, site: Site) -> Attend:
        """The function of a claimed site: that module's own from now on, no ambient state."""
        raise NotImplementedError
