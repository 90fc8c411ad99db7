"""What goes into a model, and the loss in what comes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attrs import frozen
from torch import Tensor

from dsx.errors import DsxError


@frozen
class MicroBatch:
    """A batch with its weight in the window, for `Engine.train_step`."""

    batch: Any
    weight: float = 1.0


def forward(model: Callable[..., Any], batch: Any) -> Any:
    """Call a model or an engine on a batch: a mapping as keyword arguments, a tuple or list as positional ones."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def loss_of(output: Any) -> Tensor:
    """The loss in what a model returned: itself, or `loss` of a mapping or object."""
    loss = output
    if not isinstance(output, Tensor):
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise DsxError(
            f"the model's output has no loss: {type(output).__name__}",
            expected="a tensor, or a mapping or object with `loss`",
        )
    if loss.numel() != 1:
        raise DsxError(f"the loss has the shape {list(loss.shape)}", expected="one number: take its mean")
    if not loss.requires_grad:
        raise DsxError(
            "the loss does not depend on any trainable parameter",
            remedy="compute it from the model's output, outside torch.no_grad()",
        )
    return loss.reshape(())
