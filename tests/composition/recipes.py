"""What each registered plugin means in plain PyTorch.

A plugin that is registered and not in `RECIPES` fails the matrix: whoever adds one says here what it is equal to.
"""

from __future__ import annotations

import importlib
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor, nn

from dsx.contracts import Attend
from dsx_precision.products import Products
from dsx_sparse.attend import attend_by

STEPS = 4
FOLDER = Path(tempfile.gettempdir()) / "dsx-composition"
"""Of states in files."""

ONE_BIT = ("onebit_adam", "onebit_lamb", "zero_one_adam")

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@frozen
class Recipe:
    """One plugin: how the matrix uses it, and what a plain loop does instead.

    optimizer  made of the parameters it updates
    rates      factor on the learning rate at updates 1 to 4
    precision  whether it says in which dtypes everything is; the model of the matrix is float64 unless it does
    half       dtype in which the model computes, its masters staying in fp32
    around     its forward
    scales     of the loss in updates 1 to 4
    beside     plugins without which it is refused, or others of their kind
    layout     whether it says which rank holds what; plain PyTorch in one process has no such thing
    delayed    number of the first update whose weights arrive an update later; 0: none
    attend     what computes the model's attention; its own tests hold it against explicit masks in float64
    alike      the plugin that stands for this one in pairs: they differ in arithmetic alone
    refused    words in which the matrix's model cannot be trained with it
    lacks      plugins that do not offer what it needs
    """

    section: str
    options: Mapping[str, Any] = field(factory=dict)
    optimizer: Optimizer | None = None
    rates: Sequence[float] | None = None
    precision: bool = False
    half: torch.dtype | None = None
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    scales: Sequence[float] | None = None
    beside: tuple[str, ...] = ()
    layout: bool = False
    delayed: int = 0
    attend: Callable[[], Attend] | None = None
    alike: str | None = None
    refused: str | None = None
    lacks: tuple[str, ...] = ()


def _pattern(name: str, alike: str | None = "sliding_window", **options: Any) -> Recipe:
    """A pattern of attention; with the model's few tokens, only one that counts tokens differs from a dense one."""
    options = {"block": 16, **options}

    def attend() -> Attend:
        return attend_by(name, importlib.import_module(f"dsx_sparse.{name}").Options(**options))

    return Recipe("attention", options, attend=attend, alike=alike)


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, betas=(0.8, 0.95), weight_decay=0.1, fused=True)


class Lamb(torch.optim.Optimizer):
    """LAMB as its paper has it (You et al. 2020, algorithm 2)."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 3e-3})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        (group,) = self.param_groups
        for weight in group["params"]:
            if weight.grad is None:
                continue
            state = self.state[weight]
            number = state["number"] = state.get("number", 0) + 1
            for name, beta, value in (("mean", 0.8, weight.grad), ("variance", 0.95, weight.grad.square())):
                state[name] = beta * state.get(name, 0) + (1 - beta) * value
            mean, variance = state["mean"] / (1 - 0.8**number), state["variance"] / (1 - 0.95**number)
            step = mean / (variance.sqrt() + 1e-8) + 0.1 * weight
            norms = float(weight.norm()), float(step.norm())
            size = min(max(norms[0] / norms[1], 0.01), 10.0) if min(norms) > 0 else 1.0
            weight.sub_(group["lr"] * size * step)


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)


def _rmsprop(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=1e-3, alpha=0.9, foreach=False)


RECIPES: Mapping[str, Recipe] = {
    "adamw": Recipe("optimize", {"lr": 3e-3, "betas": [0.8, 0.95], "weight_decay": 0.1}, optimizer=_adamw),
    "onebit_adam": Recipe(
        "optimize",
        {"lr": 3e-3, "betas": [0.8, 0.95], "weight_decay": 0.1},
        optimizer=_adamw,
        lacks=("zero2", "zero3"),
    ),  # before its freeze; after it, it is held against its paper in tests/plugins/test_onebit.py
    "onebit_lamb": Recipe(
        "optimize",
        {"lr": 3e-3, "betas": [0.8, 0.95], "weight_decay": 0.1},
        optimizer=Lamb,
        lacks=("zero2", "zero3"),
    ),  # before its freeze too
    "zero_one_adam": Recipe(
        "optimize",
        {"lr": 3e-3, "betas": [0.8, 0.95], "weight_decay": 0.1},
        optimizer=_adamw,
        lacks=("zero1", "zero2", "zero3"),
    ),  # while it looks at the variance in every update
    "sgd": Recipe("optimize", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, optimizer=_sgd),
    "torch_optimizer": Recipe(
        "optimize", {"name": "RMSprop", "arguments": {"lr": 1e-3, "alpha": 0.9}}, optimizer=_rmsprop
    ),
    "constant": Recipe("optimize", rates=(1, 1, 1, 1)),
    "warmup_linear": Recipe("optimize", {"warmup": 2, "final": 0.5}, rates=(0.5, 1, 0.75, 0.5)),
    "warmup_log": Recipe("optimize", {"warmup": 3}, rates=(0.5, math.log(3) / math.log(4), 1, 1)),
    "warmup_cosine": Recipe("optimize", {"warmup": 2, "final": 0.5}, rates=(0.5, 1, 0.75, 0.5)),
    "one_cycle": Recipe("optimize", {"up": 2, "start": 0.5, "final": 0.25}, rates=(0.75, 1, 0.625, 0.25)),
    "lr_range_test": Recipe("optimize", {"start": 0.5, "every": 2}, rates=(0.5, 0.75, 1.0, 1.25)),
    "wsd": Recipe("optimize", {"warmup": 1, "decay": 2, "shape": "linear", "final": 0.5}, rates=(1, 1, 0.75, 0.5)),
    "zero1": Recipe("partition", layout=True),
    "zero2": Recipe("partition", layout=True),
    "zero3": Recipe("partition", layout=True),
    "cpu_offload": Recipe("partition", {"limit_bytes": 56_000}),
    "nvme_offload": Recipe("partition", {"path": str(FOLDER)}),
    "delayed_update": Recipe("optimize", {"after": 1}, delayed=2, lacks=ONE_BIT),
    "early_update": Recipe(
        "optimize", beside=("nvme_offload", "adamw"), lacks=(*ONE_BIT, "torch_optimizer", "delayed_update")
    ),
    "sliding_window": _pattern("sliding_window", alike=None, window=3),
    "dense": _pattern("dense"),
    "local_blocks": _pattern("local_blocks"),
    "global_blocks": _pattern("global_blocks"),
    "strided": _pattern("strided"),
    "dilated": _pattern("dilated"),
    "global_local": _pattern("global_local", window=2),
    "fixed": _pattern("fixed"),
    "variable": _pattern("variable", random=1),
    "bigbird": _pattern("bigbird"),
    "streaming": _pattern("streaming", sinks=1, recent=2),
    "mixed": _pattern("mixed"),
    "document": Recipe("attention", alike="sliding_window", refused="is asked for attention without segment ids"),
    "bf16": Recipe("precision", precision=True, half=torch.bfloat16),
    "fp16": Recipe(
        "precision", precision=True, half=torch.float16, around=Products, beside=("static_loss_scale",)
    ),  # products on a CPU are made in fp32: those of torch round otherwise
    "fp32": Recipe("precision", precision=True),
    "autocast": Recipe("precision", precision=True),  # which leaves float64 alone
    "static_loss_scale": Recipe("precision", {"scale": 512.0}, scales=(512, 512, 512, 512)),
    "dynamic_loss_scale": Recipe("precision", {"initial": 256.0, "window": 2}, scales=(256, 256, 512, 512)),
    "progress": Recipe("observe"),
    "jsonl": Recipe("observe"),
    "tensorboard": Recipe("observe"),
    "trace": Recipe("observe"),
}


def complete(names: Sequence[str]) -> tuple[str, ...]:
    """With what these plugins are refused without."""
    known = [RECIPES[name] for name in names if name in RECIPES]

    def there(name: str) -> bool:
        """Whether one of them is of this one's kind."""
        kinds = [kind for kind in ("optimizer", "scales") if getattr(RECIPES[name], kind)]
        return name in names or any(getattr(recipe, kind) for kind in kinds for recipe in known)

    wanted = dict.fromkeys(more for recipe in known for more in recipe.beside)
    return (*names, *(more for more in wanted if not there(more)))


def plain(
    model: nn.Module,
    names: Sequence[str],
    data: Callable[[int, int, int], tuple[Tensor, ...]],
    *,
    world: int,
    accumulation: int,
    clip_norm: float,
) -> tuple[list[float], dict[str, Tensor]]:
    """Train as the named plugins say, without dsx; the losses, and the authoritative weights."""
    recipes = [RECIPES[name] for name in names]
    for recipe in recipes:
        for module in model.modules() if recipe.attend else ():
            if hasattr(module, "attend"):
                module.attend = recipe.attend()
    optimizer = next((recipe.optimizer for recipe in recipes if recipe.optimizer), None)
    rates = next((recipe.rates for recipe in recipes if recipe.rates), (1,) * STEPS)
    scales = next((recipe.scales for recipe in recipes if recipe.scales), (1,) * STEPS)
    delayed = max((recipe.delayed for recipe in recipes), default=0)
    half, around = next(((recipe.half, recipe.around) for recipe in recipes if recipe.half), (None, nullcontext))
    live = dict(model.named_parameters())
    apart = half or delayed  # else the live weights are the masters themselves
    masters = {
        name: nn.Parameter(_copy(parameter.detach(), half) if apart else parameter.detach(), parameter.requires_grad)
        for name, parameter in live.items()
    }
    if half:
        for tensor in (*live.values(), *model.buffers()):
            tensor.data = tensor.data.to(half)
    trained = [name for name, parameter in live.items() if parameter.requires_grad]
    step = (optimizer or _default)([masters[name] for name in trained])
    base = step.param_groups[0]["lr"]
    held = {name: masters[name].detach().clone() for name in trained}
    losses = []
    for number in range(STEPS):
        total = 0.0
        for micro in range(accumulation):
            for rank in range(world):
                with around():
                    loss = model(*data(number, micro, rank))
                share = loss / accumulation
                (share.to(torch.promote_types(share.dtype, torch.float32)) * scales[number]).backward()
                total += loss.item() / (accumulation * world)
                _collect(live, masters, trained, world)
        for name in trained:
            if (gradient := masters[name].grad) is not None:
                gradient /= scales[number]
        torch.nn.utils.clip_grad_norm_([masters[name] for name in trained], clip_norm)
        step.param_groups[0]["lr"] = base * rates[number]
        step.step()
        step.zero_grad()
        arrives = masters if not (delayed and number + 1 >= delayed) else held
        with torch.no_grad():
            for name in trained:
                live[name].copy_(arrives[name])
                held[name].copy_(masters[name])
        losses.append(total)
    weights = {name: master if name in trained else live[name] for name, master in masters.items()}
    return losses, {name: tensor.detach() for name, tensor in weights.items()}


def _copy(weight: Tensor, half: torch.dtype | None) -> Tensor:
    return weight.float() if half else weight.clone()


def _default(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


def _collect(
    live: Mapping[str, nn.Parameter], masters: Mapping[str, nn.Parameter], trained: Sequence[str], world: int
) -> None:
    """Gradients of one micro-batch of one rank, added to the masters' in the masters' dtype."""
    for name in trained:
        gradient, live[name].grad = live[name].grad, None
        if gradient is None:
            continue
        share = gradient.to(masters[name].dtype) / world
        held = masters[name].grad
        masters[name].grad = share if held is None else held + share
