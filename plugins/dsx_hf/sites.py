"""Attention sites of transformers' models: modules that take their attention function from its registry.

Entry point of the group `dsx.sites`. A claimed module is given its `attend`, and its configuration names the function
"dsx" of the registry: that one calls the `attend` of the module it is called for, or torch's attention where a module
of the same configuration was not claimed.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn

from dsx.contracts import Attend, Site
from dsx.errors import DsxError

NAME = "dsx"
KIND = "asks transformers' registry of attention functions"
_REGISTRY = "ALL_ATTENTION_FUNCTIONS"


def find(model: nn.Module) -> Iterator[Site]:
    """The modules whose forward asks transformers' registry for its attention function."""
    if "transformers" not in sys.modules:
        return
    for name, module in model.named_modules():
        forward = inspect.unwrap(type(module).forward)
        code = getattr(forward, "__code__", None)
        if code is not None and _REGISTRY in code.co_names and forward.__globals__.get(_REGISTRY) is not None:
            yield Site(name, module, KIND, partial(_place, module, name))


def _place(module: nn.Module, name: str, attend: Attend) -> Callable[[], None]:
    from dsx_hf.registry import register

    config: Any = getattr(module, "config", None)
    if config is None or not hasattr(config, "_attn_implementation"):
        raise DsxError(
            f"the attention of '{name}' cannot be replaced",
            found="the module has no `config` that names its attention function",
            remedy="leave it out of the modules of its plugin in [attention]",
        )
    register(NAME)
    before = config._attn_implementation
    config._attn_implementation = NAME
    setattr(module, "attend", attend)  # noqa: B010 -- typed as a parameter or module otherwise

    def undo() -> None:
        config._attn_implementation = before
        del module.attend

    return undo
