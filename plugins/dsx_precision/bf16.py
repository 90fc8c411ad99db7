"""Plugin `bf16`: parameters, activations and gradients in bfloat16, master weights and optimizer states in fp32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from copy import copy
from typing import Any, Literal

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from dsx.contracts import Dtypes
from dsx.plugin import Descriptor, Fill, Part, hook


@frozen(kw_only=True)
class Options:
    """`[precision.bf16]`.

    buffers  which floating buffers become bfloat16: those that are saved (`persistent`), `all` or `none`. Tables that
             are not saved stay as they are: angles computed from rounded frequencies (rotary embeddings) are wrong
    """

    buffers: Literal["persistent", "all", "none"] = "persistent"


class BFloat16(Dtypes):
    """Mixed precision (Micikevicius et al. 2018, arXiv 1710.03740) with bfloat16, whose range needs no loss scale.

    Floating parameters of 32 and 64 bits live in bfloat16, others in their own dtype, and so do those of batch and
    instance norms, whose statistics need more bits. Masters of 16-bit parameters are fp32, those of a float64 model
    too: the gradients they add up carry 8 bits.
    """

    def __init__(self, model: nn.Module) -> None:
        kept = {id(parameter) for norm in _norms(model) for parameter in norm.parameters()}
        self._keep = {name for name, parameter in model.named_parameters() if id(parameter) in kept}

    def param(self, name: str, dtype: torch.dtype) -> torch.dtype:
        return torch.bfloat16 if _wide(dtype) and name not in self._keep else dtype

    def master(self, dtype: torch.dtype, source: torch.dtype) -> torch.dtype:
        return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype

    def call(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return model(*cast(args), **cast(kwargs))


def _wide(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize >= 4


def _norms(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if isinstance(module, _NormBase))


def cast(value: Any) -> Any:
    """`value` with every floating tensor in it as bfloat16.

    Looks into tuples, lists and mappings, whose types are kept; one in which nothing changes is given back itself.
    """
    if isinstance(value, Tensor):
        return value.to(torch.bfloat16) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        changed = {key: new for key, item in value.items() if (new := cast(item)) is not item}
        return _updated(value, changed) if changed else value
    if isinstance(value, (tuple, list)):
        parts = [cast(item) for item in value]
        if all(part is item for part, item in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _updated(value: Mapping[Any, Any], changed: Mapping[Any, Any]) -> Mapping[Any, Any]:
    made = copy(value) if isinstance(value, MutableMapping) else dict(value)
    made.update(changed)
    return made


def cast_buffers(model: nn.Module, which: Literal["persistent", "all", "none"]) -> None:
    """Make floating buffers of 32 and 64 bits bfloat16, in place; not the statistics of norms."""
    kept = {id(buffer) for norm in _norms(model) for buffer in norm.buffers()}
    saved = model.state_dict(keep_vars=True) if which == "persistent" else dict(model.named_buffers())
    chosen = {id(tensor) for tensor in saved.values()} if which != "none" else set()
    for buffer in model.buffers():
        if id(buffer) in chosen - kept and _wide(buffer.dtype):
            buffer.data = buffer.data.to(torch.bfloat16)


descriptor = Descriptor(
    name="bf16",
    section="precision",
    contract=1,
    options=Options,
    fills={"dtypes": Fill()},
    summary="bfloat16 with fp32 master weights",
)


@hook
def dsx_precision(options: Options) -> list[Part]:
    return [
        Part(
            "dtypes",
            build=lambda ctx: BFloat16(ctx.model),
            bind=lambda part, ctx: cast_buffers(ctx.model, options.buffers),
        )
    ]
