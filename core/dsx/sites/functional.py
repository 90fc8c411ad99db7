"""Sites that call `torch.nn.functional.scaled_dot_product_attention`, by themselves or through functions of theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor, nn
from torch.nn import functional

from dsx.contracts import Attend, Site
from dsx.errors import DsxError
from dsx.sites.reach import forward_of, names_in, reaches
from dsx.sites.rebind import Rebinding

TARGET = functional.scaled_dot_product_attention


def find(model: nn.Module) -> Iterator[Site]:
    rebindings: dict[Attend, Rebinding] = {}

    def place(module: nn.Module, name: str, attend: Attend) -> Callable[[], None]:
        rebinding = rebindings.setdefault(attend, Rebinding(TARGET, as_torch_calls_it(attend)))
        return rebinding.place(module, name)

    for name, module in model.named_modules():
        forward = forward_of(module)
        if forward is None or (type(module).__module__ or "").startswith("torch."):
            continue
        if reaches(forward, module, TARGET) or TARGET.__name__ in names_in(forward):
            yield Site(name, module, "calls torch's scaled_dot_product_attention", partial(place, module, name))


def as_torch_calls_it(attend: Attend) -> Callable[..., Tensor]:
    """An `Attend` with the arguments and the meaning of torch's function."""

    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        _check(query, key, enable_gqa)
        if query.dim() == 3:  # a batch without heads
            mask = attn_mask if attn_mask is None or attn_mask.dim() < 3 else attn_mask.unsqueeze(1)
            q, k, v = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
            return scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, scale).squeeze(1)
        if is_causal and query.shape[2] != key.shape[2]:
            key, value = _seen(query, key), _seen(query, value)
        return attend(query, key, value, attn_mask, causal=is_causal, dropout=dropout_p, scale=scale)

    return scaled_dot_product_attention


def _check(query: Tensor, key: Tensor, enable_gqa: bool) -> None:
    if query.dim() not in (3, 4) or query.dim() != key.dim():
        raise DsxError(
            f"attention of tensors with {query.dim()} and {key.dim()} dimensions",
            expected="[batch, heads, tokens, head_dim], or [batch, tokens, head_dim]",
            remedy="leave this module out of the modules of its plugin in [attention]",
        )
    if query.dim() == 4 and query.shape[1] != key.shape[1] and not enable_gqa:
        raise DsxError(
            f"attention of {query.shape[1]} query heads and {key.shape[1]} key heads",
            expected="as many of both, or enable_gqa=True",
            remedy="pass enable_gqa=True where key heads are shared",
        )


def _seen(query: Tensor, tensor: Tensor) -> Tensor:
    """torch's is_causal lets query i see the keys up to i, counted from the first: none beyond the queries' number."""
    if query.shape[2] > tensor.shape[2]:
        raise DsxError(
            f"causal attention of {query.shape[2]} queries and {tensor.shape[2]} keys",
            expected="at least as many keys as queries",
            remedy="leave this module out of the modules of its plugin in [attention]",
        )
    return tensor[:, :, : query.shape[2]]
