"""What the 16-bit precisions share: which parameters, buffers and inputs become 16-bit, and which modules do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from dsx.contracts import Dtypes
from dsx.errors import DsxError, near

HALVES = (torch.bfloat16, torch.float16)
Buffers = Literal["persistent", "all", "none"]


@frozen(kw_only=True)
class HalfOptions:
    """Options of a 16-bit precision.

    buffers  which floating buffers become 16-bit: those that are saved (`persistent`), `all` or `none`. Tables that are
             not saved stay as they are: angles computed from rounded frequencies (rotary embeddings) are wrong
    keep     patterns of names of modules that compute in fp32, such as "*.router": what they are given is cast to fp32,
             and what they return back to 16 bits
    """

    buffers: Buffers = "persistent"
    keep: tuple[str, ...] = ()


class Half(Dtypes):
    """Mixed precision (Micikevicius et al. 2018, arXiv 1710.03740): 16-bit parameters with fp32 masters.

    Floating parameters of 32 and 64 bits live in `dtype`, others in their own dtype, and so do those of the modules
    that are kept, and those of batch and instance norms, whose statistics need more bits. Masters of 16-bit parameters
    are fp32, those of a float64 model too: the gradients they add up carry 8 or 11 bits.

    keep   patterns of names of modules
    where  the manifest's table, for errors
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, keep: Sequence[str] = (), where: str = "") -> None:
        self.dtype = dtype
        self.kept = matching(model, keep, where)
        _refuse_tied(model, self.kept, where)
        own = {id(parameter) for module in _apart(model, self.kept) for parameter in module.parameters()}
        self._keep = {name for name, parameter in model.named_parameters() if id(parameter) in own}

    def param(self, name: str, dtype: torch.dtype) -> torch.dtype:
        return self.dtype if _wide(dtype) and name not in self._keep else dtype

    def master(self, dtype: torch.dtype, source: torch.dtype) -> torch.dtype:
        return torch.float32 if dtype in HALVES else dtype

    def call(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return model(*cast(args, self.dtype), **cast(kwargs, self.dtype))

    def bind(self, model: nn.Module, buffers: Buffers) -> None:
        """Cast the buffers, and surround the kept modules with casts; once, when the parameters are in place."""
        cast_buffers(model, buffers, self.dtype, self.kept)
        for module in self.kept:
            wide = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
            module.register_forward_pre_hook(
                lambda module, args, kwargs, wide=wide: (cast(args, wide), cast(kwargs, wide)), with_kwargs=True
            )
            module.register_forward_hook(lambda module, args, output: cast(output, self.dtype))


def _wide(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize >= 4


def _apart(model: nn.Module, kept: Sequence[nn.Module]) -> Iterator[nn.Module]:
    yield from kept
    yield from (module for module in model.modules() if isinstance(module, _NormBase))


def matching(model: nn.Module, patterns: Sequence[str], where: str) -> list[nn.Module]:
    """The outermost modules whose names match a pattern. `DsxError` if a pattern matches none."""
    names = [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise DsxError(
                f"no module of the model matches '{pattern}'",
                where=where,
                found=f"modules: {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}",
                remedy=near(pattern, names),
            )
    chosen: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in chosen)
        if name and not inside and any(fnmatchcase(name, pattern) for pattern in patterns):
            chosen[name] = module
    return list(chosen.values())


def _refuse_tied(model: nn.Module, kept: Sequence[nn.Module], where: str) -> None:
    """A parameter of a kept module that another module uses too would meet 16-bit numbers there."""
    inside = {id(module) for outer in kept for module in outer.modules()}
    theirs = {id(parameter) for module in kept for parameter in module.parameters()}
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            if id(module) not in inside and id(parameter) in theirs:
                raise DsxError(
                    f"a parameter of a module kept in fp32 is '{key}' of '{name or 'the model'}' too, which is not",
                    where=where,
                    remedy="keep both, or none: they share one weight",
                )


def cast(value: Any, dtype: torch.dtype) -> Any:
    """`value` with every floating tensor in it as `dtype`.

    Looks into tuples, lists and mappings, whose types are kept; one in which nothing changes is given back itself.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        changed = {key: new for key, item in value.items() if (new := cast(item, dtype)) is not item}
        return _updated(value, changed) if changed else value
    if isinstance(value, (tuple, list)):
        parts = [cast(item, dtype) for item in value]
        if all(part is item for part, item in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _updated(value: Mapping[Any, Any], changed: Mapping[Any, Any]) -> Mapping[Any, Any]:
    made = copy(value) if isinstance(value, MutableMapping) else dict(value)
    made.update(changed)
    return made


def cast_buffers(model: nn.Module, which: Buffers, dtype: torch.dtype, kept: Sequence[nn.Module] = ()) -> None:
    """Make floating buffers of 32 and 64 bits `dtype`, in place; not those of kept modules and of norms."""
    own = {id(buffer) for module in _apart(model, kept) for buffer in module.buffers()}
    saved = model.state_dict(keep_vars=True) if which == "persistent" else dict(model.named_buffers())
    chosen = {id(tensor) for tensor in saved.values()} if which != "none" else set()
    for buffer in model.buffers():
        if id(buffer) in chosen - own and _wide(buffer.dtype):
            buffer.data = buffer.data.to(dtype)
