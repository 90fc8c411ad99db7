"""Models that the user compiled: where that can be, and what to do instead."""

from __future__ import annotations

from torch import nn

from dsx.contracts import Layout
from dsx.errors import DsxError


def refuse_compiled(model: nn.Module, layout: Layout) -> None:
    """Raise `DsxError` if what the layout does when forward enters or leaves a module lies inside compiled code."""
    if not layout.boundaries:
        return
    inside = {id(module) for unit in layout.units for module in unit.modules}
    for name, module in model.named_modules():
        region = _region(module)
        if region is not None and any(id(part) in inside for part in region.modules()):
            raise DsxError(
                "the model was compiled whole" if not name else f"the module '{name}' was compiled",
                found="the run's layout acts whenever forward enters one of the modules in it, which compiled code "
                "would not call",
                remedy="give dsx.prepare the model as it is, and set run.compile = true: it compiles what is inside of "
                "them",
            )


def _region(module: nn.Module) -> nn.Module | None:
    """What is inside the compiled code that a module stands for: by `module.compile()`, or `torch.compile(module)`."""
    if module._compiled_call_impl is not None:
        return module
    inner = module._modules.get("_orig_mod")
    return inner if isinstance(inner, nn.Module) else None
