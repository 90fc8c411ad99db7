"""fp16 against the recipe written by hand: a float16 copy of the model, fp32 masters, torch's GradScaler and AdamW."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import dsx
from dsx.errors import DsxError
from dsx.testing import check_plugin, refuses
from dsx.testing.models import Attentive, Tangle, tokens
from dsx.testing.plain import distance, largest, weights_of
from dsx_precision.fp16 import Options
from dsx_precision.products import Products

STEPS, WINDOW = 7, 2
LAYOUTS = ("replicated", "zero1", "zero2", "zero3")
Trained = tuple[list[float], list[float], dict[str, Tensor]]
"""Losses, scales and authoritative weights."""


def manifest(layout: str = "replicated", accumulation: int = 1, **options: Any) -> dict[str, Any]:
    """The loss of the test's model is float16, in which 65536 is Inf: the first update overflows, and so does each at
    which the scale is there again."""
    scale = {"initial": 65536.0, "window": WINDOW}
    tables: dict[str, Any] = {
        "batch": {"accumulation": accumulation},
        "precision": {"use": ["fp16", "dynamic_loss_scale"], "dynamic_loss_scale": scale, "fp16": options},
    }
    return tables if layout == "replicated" else tables | {"partition": {"use": [layout]}}


def train(layout: str, accumulation: int = 1) -> Trained:
    """On one rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    engine = dsx.prepare(Tangle(), manifest(layout, accumulation))
    losses, scales = [], []
    for step in range(STEPS):
        for micro in range(accumulation):
            engine.backward(engine(*tokens(step, micro, rank), step % 2 == 1))
            report = engine.step()
        assert report.loss is not None
        losses.append(report.loss)
        scales.append(engine.program.scaler.value)
    weights = weights_of(engine)
    engine.close()
    return losses, scales, weights


def train_all(accumulation: int) -> dict[str, Trained]:
    return {layout: train(layout, accumulation) for layout in LAYOUTS}


def recipe(world: int, accumulation: int = 1) -> Trained:
    """By hand; a mean over ranks is rounded to float16 where gradients travel in it."""
    model = Tangle()
    masters = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    model.half()
    live = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.AdamW(masters.values(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=WINDOW)
    losses, scales = [], []
    for step in range(STEPS):
        total = 0.0
        for micro in range(accumulation):
            for rank in range(world):
                with Products():
                    loss = model(*tokens(step, micro, rank), step % 2 == 1)
                scaler.scale(loss / accumulation).backward()
                total += loss.item() / (accumulation * world)
                add_gradients(masters, live, world)
        if accumulation == 1:
            for master in masters.values():
                master.grad = None if master.grad is None else master.grad.half().float()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, master in masters.items():
                live[name].copy_(master)
        losses.append(total)
        scales.append(scaler.get_scale())
    frozen = {name: parameter.detach() for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return losses, scales, masters | frozen


def add_gradients(masters: dict[str, Tensor], live: dict[str, nn.Parameter], world: int) -> None:
    for name, parameter in live.items():
        if parameter.grad is not None:
            gradient, master = parameter.grad.float() / world, masters[name]
            master.grad = gradient if master.grad is None else master.grad + gradient
            parameter.grad = None


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_it_is_grad_scaler_with_masters_under_every_layout(ranks: Any, world: int, accumulation: int) -> None:
    losses, scales, weights = recipe(world, accumulation)
    assert len(set(scales)) > 1
    for found in ranks.run(train_all, accumulation, world=world, timeout=120):
        for layout in LAYOUTS:
            assert found[layout][1] == scales, layout
            assert largest(found[layout][0], losses) < 1e-6, layout
            assert distance(found[layout][2], weights) < 1e-6, layout


@pytest.mark.parametrize("plugin", ["dynamic_loss_scale", "static_loss_scale"])
def test_it_keeps_its_contract(ranks: Any, plugin: str) -> None:
    table: dict[str, Any] = {"use": [plugin]}
    if plugin == "static_loss_scale":
        table[plugin] = {"scale": 512.0}
    check_plugin("fp16", beside={"precision": table}, ranks=ranks)


def test_without_a_scale_it_is_refused() -> None:
    refuses({"precision": {"use": ["fp16"]}}, "'fp16' needs 'loss.scaled'")
    refuses({"precision": {"use": ["fp16"]}}, "put 'dynamic_loss_scale' beside 'fp16' in precision.use")


def test_masters_are_made_from_the_exact_weights() -> None:
    model = nn.Linear(3, 5)
    exact = weights_of(model)
    engine = dsx.prepare(model, manifest())
    assert model.weight.dtype == torch.float16
    assert all(torch.equal(tensor, exact[name]) for name, tensor in engine.weights())


@pytest.mark.parametrize(("accumulation", "each"), [(1, 16), (2, 18)])
def test_model_state_takes_16_bytes_a_parameter_and_18_where_gradients_add_up(accumulation: int, each: int) -> None:
    engine = dsx.prepare(nn.Linear(64, 64, bias=False), manifest(accumulation=accumulation))
    for _ in range(accumulation):
        engine.backward(engine(torch.ones(1, 64)).float().sum())
        engine.step()
    held = sum(engine.program.store.bytes().values()) + sum(engine.program.layout.bytes().values())
    assert held == each * 64 * 64


class Router(nn.Linear):
    """Notes what it computes in."""

    def forward(self, input: Tensor) -> Tensor:
        self.computed = input.dtype
        return super().forward(input)


class Routed(nn.Module):
    """A layer of which a router picks parts, as mixtures of experts have; the norm is one of whole batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.router, self.norm = nn.Linear(4, 8), Router(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.inside(x))
        chosen = self.router(hidden)
        self.returned = chosen.dtype
        return (hidden * chosen.softmax(-1)).float().square().mean()


def test_modules_are_kept_in_fp32_by_pattern() -> None:
    model = Routed()
    engine = dsx.prepare(model, manifest(keep=["rout*"]))
    for _ in range(3):
        engine.backward(engine(torch.randn(16, 4)))
        assert engine.step().stepped
    assert (model.router.computed, model.returned) == (torch.float32, torch.float16)
    assert model.router.weight.dtype == model.norm.weight.dtype == torch.float32
    assert model.norm.running_mean.dtype == torch.float32  # type: ignore[union-attr]
    assert model.inside.weight.dtype == torch.float16


def test_a_pattern_that_keeps_nothing_is_refused() -> None:
    with pytest.raises(DsxError, match=r"no module of the model matches 'ruoter'[\s\S]*\[precision.fp16\] keep"):
        dsx.prepare(Routed(), manifest(keep=["ruoter"]))


def test_a_tied_weight_is_kept_by_all_of_its_modules_or_none() -> None:
    with pytest.raises(DsxError, match="kept in fp32 is 'weight' of 'head' too, which is not"):
        dsx.prepare(Tangle(), manifest(keep=["embedding"]))
    engine = dsx.prepare(Tangle(), manifest(keep=["embedding", "head"]))
    engine.backward(engine(*tokens(0, 0, 0)))
    assert engine.model.head.weight.dtype == torch.float32  # type: ignore[union-attr]


Product = Callable[..., Tensor]
CASES: dict[str, tuple[Product, tuple[tuple[int, ...], ...]]] = {
    "linear": (functional.linear, ((3, 5, 16), (8, 16), (8,))),
    "matmul": (torch.matmul, ((3, 5, 16), (16, 8))),
    "operator": (lambda a, b: a @ b, ((3, 5, 16), (3, 16, 8))),
    "with itself": (lambda a: a @ a.mT, ((4, 8),)),
    "addmm": (torch.addmm, ((5, 8), (5, 16), (16, 8))),
    "einsum": (lambda a, b: torch.einsum("bij,bkj->bik", a, b), ((3, 5, 16), (3, 4, 16))),
    "conv": (functional.conv2d, ((2, 3, 8, 8), (4, 3, 3, 3), (4,))),
    "attention": (
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        ((2, 3, 7, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    ),
    "empty": (functional.linear, ((0, 16), (8, 16))),
}


@pytest.mark.parametrize("case", CASES)
def test_products_on_a_cpu_are_rounded_once(case: str) -> None:
    """In the float16 arithmetic of a CPU, sums of products are rounded many times."""
    product, shapes = CASES[case]
    generator = torch.Generator().manual_seed(0)
    operands = [torch.randn(shape, generator=generator).half().requires_grad_() for shape in shapes]
    with Products():
        result = product(*operands)
    gradient = torch.randn(result.shape, generator=generator).half()
    result.backward(gradient)
    exact = [operand.detach().double().requires_grad_() for operand in operands]
    right = product(*exact)
    right.backward(gradient.double())
    assert result.dtype == torch.float16
    pairs = [(result, right), *((a.grad, b.grad) for a, b in zip(operands, exact, strict=True))]
    for found, wanted in pairs:
        assert found is not None and wanted is not None and found.dtype == torch.float16
        assert (found.double() - wanted).norm() <= 4e-4 * wanted.norm()  # half a unit in the last of 11 bits: 4.9e-4


def test_attention_of_several_results_is_one_of_them() -> None:
    torch.manual_seed(0)
    exact = nn.MultiheadAttention(16, 2, batch_first=True)
    module = nn.MultiheadAttention(16, 2, batch_first=True).half()
    module.load_state_dict(exact.state_dict())
    x = torch.randn(2, 5, 16).half().requires_grad_()
    wide = x.detach().float().requires_grad_()
    for need_weights in (True, False):
        with Products():
            result, probabilities = module(x, x, x, need_weights=need_weights)
        right, _ = exact(wide, wide, wide)
        result.float().square().sum().backward()
        right.square().sum().backward()
        assert (probabilities is not None) == need_weights
        assert result.dtype == torch.float16
        assert (result - right).norm() < 2e-3 * right.norm()
    assert (x.grad - wide.grad).norm() < 2e-3 * wide.grad.norm()  # type: ignore[union-attr, operator]


def test_products_of_other_dtypes_are_left_alone() -> None:
    wide, narrow = torch.randn(4, 4), torch.randn(4, 4).bfloat16()
    with Products():
        assert torch.equal(wide @ wide, wide.matmul(wide))
        assert (narrow @ narrow).dtype == torch.bfloat16
        with pytest.raises(RuntimeError, match="same dtype"):
            wide @ wide.half()


def test_products_keep_no_copies_of_their_operands() -> None:
    weight = torch.randn(8, 8).half().requires_grad_()
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with Products(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        functional.linear(functional.linear(torch.ones(2, 8).half(), weight), weight)
    assert {tensor.dtype for tensor in kept} == {torch.float16}
    assert sum(tensor.data_ptr() == weight.data_ptr() for tensor in kept) == 2


def test_a_backward_may_be_repeated() -> None:
    x, weight = torch.ones(2, 8).half(), torch.randn(8, 8).half().requires_grad_()
    with Products():
        loss = functional.linear(x, weight).float().sum()
    loss.backward(retain_graph=True)
    first = weight.grad.clone()  # type: ignore[union-attr]
    loss.backward()
    assert torch.equal(weight.grad, 2 * first)  # type: ignore[arg-type]


class Recomputed(Attentive):
    """Its blocks and attention are computed again in backward."""

    def forward(self, inputs: Tensor, targets: Tensor, side: bool = False) -> Tensor:
        hidden = self.embedding(inputs)
        for layer, block in enumerate(self.blocks):
            hidden = checkpoint(
                lambda x, block=block, layer=layer: block(x + self.attention[str(layer)](x)),
                hidden,
                use_reentrant=False,
            )
        return functional.cross_entropy(self.head(hidden).float().flatten(0, 1), targets.flatten())


class Kept(Recomputed):
    def forward(self, inputs: Tensor, targets: Tensor, side: bool = False) -> Tensor:
        hidden = self.embedding(inputs)
        for layer, block in enumerate(self.blocks):
            hidden = block(hidden + self.attention[str(layer)](hidden))
        return functional.cross_entropy(self.head(hidden).float().flatten(0, 1), targets.flatten())


def train_attentive() -> dict[str, dict[str, Tensor]]:
    found = {}
    for layout in ("replicated", "zero3"):
        for make in (Kept, Recomputed):
            engine = dsx.prepare(make(), manifest(layout))
            for step in range(3):
                engine.backward(engine(*tokens(step, 0, dist.get_rank())))
                engine.step()
            found[f"{layout} {make.__name__}"] = weights_of(engine)
            engine.close()
    return found


def test_recomputation_makes_the_same_products(ranks: Any) -> None:
    for found in ranks.run(train_attentive, world=2):
        wanted = found.pop("replicated Kept")
        for name, weights in found.items():
            assert distance(weights, wanted) < 1e-6, name


UPDATE = """
import sys, torch, dsx
engine = dsx.prepare(torch.nn.Linear(4, 4), {"precision": {"use": ["fp16", "dynamic_loss_scale"]}})
known = set(sys.modules)
engine.backward(engine(torch.ones(2, 4)).float().sum())
print(sorted(name for name in set(sys.modules) - known if name.startswith(("torch", "sympy"))))
"""


def test_products_import_nothing() -> None:
    """torch.autograd.grad would bring its compiler, half a second, in the first backward."""
    folders = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", UPDATE], env=os.environ | folders, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_its_options_are_those_of_the_table() -> None:
    assert Options() == Options(buffers="persistent", keep=())
    refuses({"precision": {"use": ["fp16"], "fp16": {"buffers": "some"}}}, "precision.fp16.buffers")
