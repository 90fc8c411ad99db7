"""Sites that say so: modules that call their own attribute `attend`, or `dsx.attention(self, ...)`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor, nn

from dsx.contracts import Attend, Site, plain_attention
from dsx.contracts.attention import Undo
from dsx.sites.reach import forward_of, reaches

NAME = "attend"


def attention(
    module: nn.Module,
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
    """Attention of a module whose forward calls this: by whatever claims it in the run, else by torch.

    module  the one that calls, `self`; its name in the model is what the patterns of [attention] match
    others  as `dsx.contracts.Attend` has them: a boolean mask says True where a pair may attend

    Raises `DsxError` for a mask of another dtype or shape.
    """
    attend: Attend = getattr(module, NAME, plain_attention)
    return attend(q, k, v, mask, causal=causal, dropout=dropout, scale=scale, segments=segments)


def find(model: nn.Module) -> Iterator[Site]:
    for name, module in model.named_modules():
        if callable(getattr(module, NAME, None)):
            yield Site(name, module, f"calls its attribute `{NAME}`", partial(place, module))
        elif (forward := forward_of(module)) is not None and reaches(forward, module, attention):
            yield Site(name, module, "calls `dsx.attention`", partial(place, module))


def place(module: nn.Module, attend: Attend) -> Undo:
    """Give a module the attribute; the undo brings back what it was."""
    before = module.__dict__.get(NAME)
    setattr(module, NAME, attend)

    def undo() -> None:
        if before is None:
            delattr(module, NAME)
        else:
            setattr(module, NAME, before)

    return undo
