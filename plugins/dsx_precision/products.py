"""Matrix products of float16 tensors on CPUs, made in fp32.

torch's own are two orders slower than those of fp32 where the processor has no float16 unit. A product of two float16
numbers is exact in fp32, so casting the operands and rounding the result once is what a GPU does, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode

PRODUCTS: frozenset[Callable[..., Any]] = frozenset(
    {
        *(getattr(torch, name) for name in ("matmul", "mm", "bmm", "mv", "addmm", "baddbmm", "einsum")),
        *(getattr(Tensor, name) for name in ("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv")),
        *(getattr(Tensor, name) for name in ("addmm", "baddbmm")),
        *(getattr(functional, f"{kind}{n}d") for kind in ("conv", "conv_transpose") for n in (1, 2, 3)),
        functional.linear,
        functional.bilinear,
        functional.scaled_dot_product_attention,
        functional.multi_head_attention_forward,
    }
)


class Products(TorchFunctionMode):
    """Within it, these products of float16 tensors on CPUs are made in fp32 and rounded; nothing else is touched.

    What autograd keeps of them until backward is float16, as without it.
    """

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward and args[0].requires_grad:
            return self._backward(*args, **kwargs)
        if func not in PRODUCTS or not _all_half((*args, *kwargs.values())) or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        names, first = tuple(kwargs), len(args)

        def product(values: Sequence[Any]) -> Any:
            return func(*values[:first], **dict(zip(names, values[first:], strict=True)))

        return _InFp32.apply(product, *args, *kwargs.values())  # type: ignore[no-untyped-call]

    def _backward(self, loss: Tensor, gradient: Tensor | None = None, **choices: Any) -> None:
        """torch leaves the mode for as long as a function of tensors runs, and in this one activations are computed
        again; a function of an edge of the graph is none."""
        with self:
            torch.autograd.backward(get_gradient_edge(loss), gradient, **choices)


def _all_half(values: Iterable[Any]) -> bool:
    """Whether float16 tensors on a CPU are all the floating tensors there are."""
    floating = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    return bool(floating) and all(v.dtype == torch.float16 and v.device.type == "cpu" for v in floating)


class _InFp32(torch.autograd.Function):
    """A product in fp32 with its own small graph, in which the casts of operands are not kept, but made anew."""

    @staticmethod
    def forward(ctx: Any, product: Callable[[Sequence[Any]], Any], *values: Any) -> Any:
        ctx.half = [number for number, value in enumerate(values) if _all_half([value])]
        needed = [ctx.needs_input_grad[number + 1] for number in ctx.half]
        ctx.save_for_backward(*(values[number] for number in ctx.half) if any(needed) else ())
        ctx.operands = operands = _Operands()
        ctx.leaves = [values[n].detach().requires_grad_(need) for n, need in zip(ctx.half, needed, strict=True)]
        with torch.set_grad_enabled(any(needed)), saved_tensors_hooks(operands.pack, operands.unpack):
            filled = list(values)
            for number, wide in zip(ctx.half, operands.widen(ctx.leaves), strict=True):
                filled[number] = wide
            several = product(filled)
            results = several if isinstance(several, tuple) else (several,)
            results = tuple(None if result is None else result.to(torch.float16) for result in results)
            ctx.ends = [number for number, r in enumerate(results) if r is not None and r.requires_grad]
            ctx.gradients = []
            end = _End.apply(ctx.gradients, *(results[n] for n in ctx.ends)) if ctx.ends else None  # type: ignore[no-untyped-call]
        ctx.edge = None if end is None else get_gradient_edge(end)
        operands.memories.clear()
        outputs = tuple(None if result is None else result.detach() for result in results)
        return outputs if isinstance(several, tuple) else outputs[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.operands.halves = ctx.saved_tensors
        ctx.gradients[:] = [gradients[number] for number in ctx.ends]
        wanted = [leaf for leaf in ctx.leaves if leaf.requires_grad]
        found = iter(torch.autograd.grad(ctx.edge, wanted, retain_graph=True, allow_unused=True))
        ctx.operands.halves, ctx.gradients[:] = (), []
        results: list[Tensor | None] = [None] * (len(ctx.needs_input_grad) - 1)
        for number, leaf in zip(ctx.half, ctx.leaves, strict=True):
            results[number] = next(found) if leaf.requires_grad else None
        return None, *results


class _End(torch.autograd.Function):
    """A number at the end of a graph, whose gradients are those in `gradients` then: given some, torch.autograd.grad
    imports its compiler."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *results: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *ones: Any) -> Any:
        return None, *ctx.gradients


class _Operands:
    """Casts of operands, known by their memory while a product is made; later made again from `halves`."""

    def __init__(self) -> None:
        self.memories: dict[int, int] = {}
        self.halves: Sequence[Tensor] = ()

    def widen(self, halves: Sequence[Tensor]) -> list[Tensor]:
        wide = [half.to(torch.float32) for half in halves]
        self.memories = {tensor.untyped_storage().data_ptr(): number for number, tensor in enumerate(wide)}
        return wide

    def pack(self, tensor: Tensor) -> Any:
        number = self.memories.get(tensor.untyped_storage().data_ptr())
        return tensor if number is None else (number, tensor.size(), tensor.stride(), tensor.storage_offset())

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        number, size, stride, offset = packed
        wide: Tensor = self.halves[number].to(torch.float32)
        return wide.as_strided(size, stride, offset)
