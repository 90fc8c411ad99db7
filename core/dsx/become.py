"""A tensor becomes another one, and stays the object that it is."""

from __future__ import annotations

import torch
from torch import Tensor


def become(tensor: Tensor, value: Tensor) -> None:
    """Give `tensor` the memory, device, dtype and shape of `value`; its class, attributes, hooks and `requires_grad`
    stay.

    Unlike an assignment to `tensor.data` this leaves the meta device. Whoever holds the object sees it: ties by object,
    weak references, lists that modules keep of their weights.
    """
    hooks = {name: found for name in _HOOKS if (found := getattr(tensor, name, None))}
    fresh = value.data.requires_grad_(tensor.requires_grad)  # counts its own changes, as after `tensor.data = value`
    torch._C._swap_tensor_impl(tensor, fresh)
    for name, found in hooks.items():
        setattr(tensor, name, found)


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
