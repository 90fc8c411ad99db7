"""Shapes told by rule against torch's own, and a plan of a number of parameters that wakes no compiler."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from dsx.plan.shapes import RULES, result

SHAPES = ((), (0,), (7,), (3, 5))
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ATEN = torch.ops.aten


def empty(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def calls(func: Any) -> list[tuple[Any, ...]]:
    """Arguments of every kind that the operation takes."""
    name, tensors = func._schema.name, [empty(*kind) for kind in product(SHAPES, DTYPES)]
    if name in ("aten::stack", "aten::cat"):
        return [([one, other],) for one, other in product(tensors, tensors)]
    if name == "aten::pow":
        return [(one, power) for one in tensors for power in (2, 0.5)]
    if name == "aten::clamp_":
        return [(one, -1.0, 1.0) for one in tensors]
    if name in ("aten::add", "aten::sub", "aten::mul", "aten::div", "aten::add_", "aten::mul_", "aten::div_"):
        return list(product(tensors, [*tensors, 2, 0.5]))
    return [(one,) for one in tensors]


def described(found: Any) -> Any:
    return found.shape, found.dtype, found.stride(), found.device


@pytest.mark.parametrize("func", RULES, ids=str)
def test_a_rule_says_what_torch_says(func: Any) -> None:
    known = 0
    for args in calls(func):
        found = result(func, args, {})
        if found is NotImplemented:
            continue
        known += 1
        assert described(found) == described(func(*args)), args
    assert known >= len(SHAPES), "the rule answers for next to nothing"


@pytest.mark.parametrize(
    ("func", "args", "kwargs"),
    [
        (ATEN.sum.default, (empty((7,)),), {"dtype": torch.float64}),
        (ATEN.linalg_vector_norm.default, (empty((7,), torch.bfloat16), 2), {"dtype": torch.float32}),
        (ATEN.zeros_like.default, (empty((3, 5)),), {"dtype": torch.float16}),
        (ATEN.add.Tensor, (empty((7,)), empty((7,))), {"alpha": 2}),
    ],
    ids=str,
)
def test_choices_are_followed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert described(result(func, args, kwargs)) == described(func(*args, **kwargs))


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (ATEN.add.Tensor, (empty((3, 5)), empty((5,)))),
        (ATEN.add.Tensor, (empty((3,)), torch.zeros(3))),
        (ATEN.mul.Tensor, (empty((3,)), 2j)),
        (ATEN.add.Tensor, (empty((3, 5)).t(), empty((5, 3)))),
        (ATEN.sum.default, (empty((3,), torch.int64),)),
        (ATEN.cat.default, ([empty((3, 5)), empty((3, 5))],)),
        (ATEN.stack.default, ([empty((3,)), empty((3,))], 1)),
        (ATEN.linalg_vector_norm.default, (empty((3, 5)), 2, [0])),
        (ATEN.add_.Tensor, (empty((3,)), empty((1,)))),
        (ATEN.exp.default, (empty((3,)),)),
    ],
    ids=str,
)
def test_what_is_not_plain_is_left_to_torch(func: Any, args: tuple[Any, ...]) -> None:
    assert result(func, args, {}) is NotImplemented


PROGRAM = """
import json, sys, dsx
for layout in ("zero1", "zero2", "zero3"):
    for precision in ([], ["bf16"], ["fp16", "dynamic_loss_scale"]):
        for rule in ([], ["adamw"], ["sgd"]):
            use = {"partition": [layout], "precision": precision, "optimize": rule}
            dsx.forecast(10_000_000, {section: {"use": names} for section, names in use.items()}, world=8)
print(json.dumps([name for name in ("torch._dynamo", "sympy") if name in sys.modules]))
"""


def test_a_number_of_parameters_is_planned_without_a_compiler() -> None:
    """Its import alone takes as long as the plan may."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
