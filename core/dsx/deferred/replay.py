"""Makes promised memory real: by the steps that it depends on, and no others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from dsx.deferred.on_meta import each, mapped
from dsx.deferred.promise import Draw, Given, Promise, Step, View
from dsx.errors import DsxError

Memories = dict[Promise, Tensor]
"""What is there of promised memory: uint8 [bytes]."""


def real(views: Sequence[View]) -> list[Tensor]:
    """Real tensors for views of promised memory, with the values that they had then.

    Views of one memory stay views of one memory. What they were computed from is there meanwhile, and gone afterwards.
    Raises `DsxError` where they depend on a tensor whose values nobody knows.
    """
    return _real(views, {})


def real_into(target: Tensor, view: View) -> None:
    """As `real`, written to `target`, which is contiguous; where it can be, the steps are done in that very memory."""
    device, flags = view.promise.device, view.conjugated or view.negated
    alike = (view.dtype, view.stride, device) == (target.dtype, target.stride(), target.device)
    in_place = alike and view.covers and not flags
    (value,) = _real([view], {view.promise: target.flatten().view(torch.uint8)} if in_place else {})
    if value.data_ptr() != target.data_ptr():
        target.copy_(value)


def real_now(value: Any) -> Any:
    """Nested arguments with real tensors in place of promised ones, those of one memory sharing it still."""
    promised_ones = [tensor for tensor in each(Tensor, value) if tensor.is_meta]
    made = iter(real([View.of(tensor) for tensor in promised_ones]))
    return mapped(Tensor, lambda tensor: next(made) if tensor.is_meta else tensor, value)


def _real(views: Sequence[View], memories: Memories) -> list[Tensor]:
    with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
        for step in _needed(views):
            _run(step, memories)
        return [view.on(_memory(view, memories, zero=True)) for view in views]


def _needed(views: Sequence[View]) -> list[Step]:
    """The steps that the views depend on, in the order in which they were made."""
    steps: dict[int, Step] = {}
    seen: set[tuple[int, int]] = set()
    open_views = list(views)
    while open_views:
        view = open_views.pop()
        for place in reversed(range(view.after)):
            step = view.promise.steps[place]
            if (id(view.promise), place) in seen:
                break
            seen.add((id(view.promise), place))
            if step.number not in steps:
                steps[step.number] = step
                open_views += _read(step)
            if step.fills is view.promise:
                break
    return [steps[number] for number in sorted(steps)]


def _read(step: Step) -> Sequence[View]:
    """The views whose values a step reads."""
    args = step.args if step.fills is None else step.args[1:]
    return each(View, (args, step.kwargs))


def _run(step: Step, memories: Memories) -> None:
    def there(view: View) -> Tensor:
        return view.on(_memory(view, memories, zero=view.promise is not step.fills))

    args, kwargs = mapped(Given, _unchanged, mapped(View, there, (step.args, step.kwargs)))
    given = {tensor.untyped_storage()._cdata for tensor in each(Tensor, (args, kwargs))}
    with _default_dtype(step.default), _drawing(step.draw) as explicit:
        result = step.func(*args, **{**kwargs, **explicit})
    for tensor, view in zip(each(Tensor, result), step.made, strict=True):
        if view is not None:
            _place(tensor, view, memories, tensor.untyped_storage()._cdata in given)


def _unchanged(given: Given) -> Tensor:
    if given.changed:
        raise DsxError(
            "a tensor that the model's constructor read was changed before dsx.prepare",
            found=f"{given.tensor.dtype} {list(given.tensor.shape)}",
            remedy="change a copy of it, or build the model without dsx.empty_init()",
        )
    return given.tensor


def _memory(view: View, memories: Memories, zero: bool) -> Tensor:
    """Memory for a view. What nobody has written yet is zero: ranks must not differ in it."""
    promise = view.promise
    if promise not in memories:
        if promise.device.type == "meta":
            raise DsxError(
                "a tensor on the meta device has no values",
                found=f"{view.dtype} {list(view.size)}, or what was computed from it",
                remedy="build the whole model within `with dsx.empty_init():`, and give no device there",
            )
        make = torch.zeros if zero else torch.empty
        memories[promise] = make(promise.size, dtype=torch.uint8, device=promise.device)
    return memories[promise]


def _place(tensor: Tensor, view: View, memories: Memories, shared: bool) -> None:
    """Keep a result as later steps expect it: laid out like the view, in memory that no argument has."""
    storage = tensor.untyped_storage()
    found = (tensor.stride(), tensor.storage_offset(), storage.nbytes())
    if found == (view.stride, view.offset, view.promise.size) and not shared and view.promise not in memories:
        memories[view.promise] = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    else:
        view.on(_memory(view, memories, zero=False)).copy_(tensor)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _drawing(draw: Draw | None) -> Iterator[dict[str, torch.Generator]]:
    """Have the random numbers again; the keyword arguments that bring them."""
    if draw is None:
        yield {}
    elif draw.explicit:
        generator = torch.Generator(draw.device)
        generator.set_state(draw.state)
        yield {"generator": generator}
    else:
        generator = default_generator(draw.device)
        before = generator.get_state()
        generator.set_state(draw.state)
        try:
            yield {}
        finally:
            generator.set_state(before)


def default_generator(device: torch.device) -> torch.Generator:
    """The device's own generator of random numbers."""
    if device.type == "cpu":
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    module.init()
    number = module.current_device() if device.index is None else device.index
    found: torch.Generator = module.default_generators[number]
    return found
