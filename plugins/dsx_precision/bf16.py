"""Plugin `bf16`: parameters, activations and gradients in bfloat16, master weights and optimizer states in fp32."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from dsx.contracts import Dtypes
from dsx.plugin import Descriptor, Fill, Part, hook


class BFloat16(Dtypes):
    """Mixed precision (Micikevicius et al. 2018, arXiv 1710.03740) with bfloat16, whose range needs no loss scale.

    Floating parameters of 32 and 64 bits live in bfloat16, others in their own dtype. Buffers are left alone, and so
    are the parameters of batch and instance norms, which need the dtype of their statistics. Masters of 16-bit
    parameters are fp32, those of a float64 model too: the gradients they add up carry 8 bits.
    """

    def __init__(self, model: nn.Module) -> None:
        norms = [module for module in model.modules() if isinstance(module, _NormBase)]
        kept = {id(parameter) for module in norms for parameter in module.parameters()}
        self._keep = {name for name, parameter in model.named_parameters() if id(parameter) in kept}

    def param(self, name: str, dtype: torch.dtype) -> torch.dtype:
        wide = dtype.is_floating_point and dtype.itemsize >= 4
        return torch.bfloat16 if wide and name not in self._keep else dtype

    def master(self, dtype: torch.dtype, source: torch.dtype) -> torch.dtype:
        return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype

    def call(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return model(*cast(args), **cast(kwargs))


def cast(value: Any) -> Any:
    """`value` with every floating tensor in it as bfloat16.

    Looks into tuples, lists and mappings, whose types are kept; one in which nothing changes is given back itself.
    """
    if isinstance(value, Tensor):
        return value.to(torch.bfloat16) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        items = {key: cast(item) for key, item in value.items()}
        changed = {key: item for key, item in items.items() if item is not value[key]}
        if not changed or not isinstance(value, MutableMapping):
            return items if changed else value
        made = copy(value)
        made.update(changed)
        return made
    if isinstance(value, (tuple, list)):
        parts = [cast(item) for item in value]
        if all(part is item for part, item in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


descriptor = Descriptor(
    name="bf16",
    section="precision",
    contract=1,
    fills={"dtypes": Fill()},
    summary="bfloat16 with fp32 master weights",
)


@hook
def dsx_precision() -> list[Part]:
    return [Part("dtypes", lambda ctx: BFloat16(getattr(ctx.model, "_orig_mod", ctx.model)))]
