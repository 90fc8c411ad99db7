"""What every implementation of `block_attention` is held against: dense attention by the explicit mask, in float64.

`check(engine, case)` runs both passes of an implementation on a case's tensors, and compares the output, the
log-sum-exp and every gradient with what autograd makes of the definition.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dsx_kernels.block_attention import BlockLayout, dropout
from dsx_kernels.block_attention.engine import Call, Engine

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
TOLERANCE = {F64: 1e-12, F32: 1e-5, F16: 2e-3, BF16: 1e-2}
"""Largest error, relative to the largest number of a tensor, and of the whole tensor by its norm."""


@dataclass(frozen=True)
class Case:
    """One call. `near`: a block of queries sees so many blocks of keys on each side, and the first one."""

    queries: int
    keys: int
    block: int = 16
    dim: int = 32
    batch: int = 1
    heads: int = 2
    key_heads: int = 2
    dtype: torch.dtype = F32
    near: int = 2
    causal: bool = True
    window: int | None = None
    padding: bool = False
    bias: tuple[int, ...] | None = None
    segments: bool = False
    bits: bool = False
    mixed: bool = False
    strided: bool = False
    dropout: float = 0.0
    scale: float | None = None

    def __str__(self) -> str:
        default = {name: field.default for name, field in self.__dataclass_fields__.items()}
        return " ".join(f"{name}={value}" for name, value in vars(self).items() if value != default[name])

    def tensors(self) -> dict[str, Tensor]:
        """q, k, v, and the gradients of output and log-sum-exp, the same in every call."""
        generator = torch.Generator().manual_seed(zlib.crc32(str(self).encode()))

        def tensor(heads: int, tokens: int) -> Tensor:
            shape = (self.batch, tokens, heads, self.dim + 8) if self.strided else (self.batch, heads, tokens, self.dim)
            made = torch.randn(shape, generator=generator).to(self.dtype)
            return made[..., : self.dim].transpose(1, 2) if self.strided else made

        made = {"q": tensor(self.heads, self.queries)}
        made |= {name: tensor(self.key_heads, self.keys) for name in "kv"}
        made["grad"] = tensor(self.heads, self.queries)
        if self.strided:  # the last dimension too
            made["v"] = made["v"].mT.contiguous().mT
        made["grad_lse"] = torch.randn(made["q"].shape[:-1], generator=generator)
        if self.bias is not None:
            made["bias"] = torch.randn(self.bias, generator=generator).to(self.dtype)
        if self.padding:
            made["padding"] = torch.rand(self.batch, self.keys, generator=generator) > 0.3
            made["padding"][0, : self.block] = False  # whole rows without keys
        return made

    def layout(self) -> BlockLayout:
        generator = torch.Generator().manual_seed(1)
        rows, columns = -(-self.queries // self.block), -(-self.keys // self.block)
        place = torch.arange(rows)[:, None] + columns - rows - torch.arange(columns)
        blocks = ((place.abs() < self.near) | (torch.arange(columns) == 0))[None]
        heads = [0] * self.heads
        if self.mixed:  # each head has blocks of its own, the last head none
            blocks = (blocks & (torch.rand(self.heads, rows, columns, generator=generator) > 0.3)).clone()
            blocks[-1], heads = False, list(range(self.heads))
        more: dict[str, Any] = {}
        if self.segments:
            segments = torch.randint(0, 3, (self.batch, self.keys), generator=generator).sort().values
            more = {"query_segments": segments[:, -self.queries :], "key_segments": segments}
        if self.bits:
            more["bits"] = torch.randint(
                0, 256, (3, self.block, self.block // 8), generator=generator, dtype=torch.uint8
            )
            more["masks"] = torch.randint(-1, 3, blocks.shape, generator=generator)
        return BlockLayout.from_blocks(
            blocks,
            block=self.block,
            query_len=self.queries,
            key_len=self.keys,
            heads=heads,
            causal=self.causal,
            window=self.window,
            **more,
        )

    def call(self, layout: BlockLayout, tensors: Mapping[str, Tensor]) -> Call:
        bias = tensors.get("bias")
        if bias is not None:
            bias = bias.expand(self.batch, self.heads, self.queries, self.keys)
        scale = self.dim**-0.5 if self.scale is None else self.scale
        return Call(layout, scale, tensors.get("padding"), bias, self.dropout, 7)


@lru_cache(maxsize=1)
def dense(case: Case) -> dict[str, Tensor]:
    """The definition and its gradients, in float64 by autograd."""
    tensors = case.tensors()
    call = case.call(case.layout(), tensors)
    names = [name for name in ("q", "k", "v", "bias") if name in tensors]
    wide = {name: tensors[name].to(F64).requires_grad_() for name in names}
    share = case.heads // case.key_heads
    keys, values = (wide[name].repeat_interleave(share, 1) for name in "kv")
    scores = wide["q"] @ keys.mT * call.scale + wide.get("bias", 0)
    allowed = call.layout.mask().expand(scores.shape)
    if call.key_padding is not None:
        allowed = allowed & call.key_padding[:, None, None]
    empty = ~allowed.any(-1)
    lse = scores.masked_fill(~allowed, -1e300).logsumexp(-1).masked_fill(empty, 0)
    weights = torch.where(allowed, torch.exp(scores - lse[..., None]), 0.0)
    if call.dropout:
        kept = dropout.keep(case.batch * case.heads, case.queries, case.keys, call.dropout, 7, scores.device)
        weights = weights * kept.reshape(weights.shape) / (1 - call.dropout)
    out = weights @ values
    total = (out * tensors["grad"].to(F64)).sum() + (lse * tensors["grad_lse"].to(F64)).sum()
    grads = torch.autograd.grad(total, [wide[name] for name in names])
    made = {f"grad_{name}": grad for name, grad in zip(names, grads, strict=True)}
    return {"out": out.detach(), "lse": lse.detach().masked_fill(empty, float("-inf")), **made}


def run(engine: Engine, case: Case, device: str = "cpu") -> dict[str, Tensor]:
    """What both passes of an implementation make of a case."""
    tensors = {name: tensor.to(device) for name, tensor in case.tensors().items()}
    call = case.call(case.layout().to(device), tensors)
    q, k, v = (tensors[name] for name in "qkv")
    out, lse = engine.forward(q, k, v, call)
    grads = engine.backward(tensors["grad"], tensors["grad_lse"], q, k, v, out, lse, call, "bias" in tensors)
    q, k, v, bias = grads
    found = {"out": out, "lse": lse, "grad_q": q, "grad_k": k, "grad_v": v}
    if bias is not None:
        found["grad_bias"] = bias.sum_to_size(tensors["bias"].shape)
    return {name: tensor.cpu() for name, tensor in found.items()}


def check(engine: Engine, case: Case, device: str = "cpu") -> dict[str, Tensor]:
    """Hold an implementation against the definition. `AssertionError` that names what is off, and how far."""
    found, wanted = run(engine, case, device), dense(case)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        _assert_near(f"{case}: {name}", found[name].to(F64), tensor, TOLERANCE[case.dtype])
    return found


def _assert_near(what: str, found: Tensor, wanted: Tensor, tolerance: float) -> None:
    finite = torch.isfinite(wanted)
    assert torch.equal(found[~finite], wanted[~finite]), f"{what} is not -inf where it must be"
    if not finite.any():
        return
    found, wanted = found[finite], wanted[finite]
    error = (found - wanted).abs()
    most = float(error.max() / wanted.abs().max().clamp(min=1e-30))
    norm = float(error.norm() / wanted.norm().clamp(min=1e-30))
    exact = not wanted.any() and not found.any()
    assert exact or (most <= tolerance and norm <= tolerance), f"{what} is off by {most:.2g}, in norm {norm:.2g}"


_PLAIN = (
    *(Case(length, length, block=16 if length < 20 else 64) for length in (1, 17, 128)),
    Case(1000, 1000, block=128, dim=64),
    Case(1025, 1025, block=128, dim=64, key_heads=1),
)
_RULES = (
    Case(100, 300, block=32, window=50),
    Case(100, 300, block=32, window=50, causal=False),
    Case(300, 100, block=64, dim=40),  # the first queries see no key
    Case(200, 200, causal=False, near=1, block=128),
    Case(200, 200, block=32, segments=True, batch=2, heads=4, key_heads=2),
    Case(200, 200, block=64, segments=True, batch=2, window=70, causal=False),
    Case(150, 170, block=16, bits=True, near=3),
    Case(150, 170, block=64, bits=True, causal=False, near=3, window=100),
    Case(170, 170, block=16, mixed=True, heads=6, key_heads=2),
    Case(130, 130, block=32, padding=True, batch=3),
    Case(130, 130, block=64, padding=True, batch=2, heads=4, key_heads=1, causal=False),
    Case(90, 120, block=16, bias=(1, 2, 90, 120)),
    Case(90, 120, block=64, bias=(2, 1, 90, 120), batch=2, padding=True),
    Case(90, 120, block=32, bias=(1, 2, 1, 120), window=40),
    Case(90, 90, block=16, dropout=0.3, batch=2),
    Case(90, 90, block=64, dropout=0.3, bias=(1, 2, 90, 90), padding=True),
    Case(120, 120, block=32, strided=True, batch=2),
    Case(120, 120, block=64, strided=True, padding=True, heads=4, key_heads=2, scale=0.7),
)
_DIMS = tuple(Case(70, 70, block=32, dim=dim) for dim in (8, 33, 48, 72, 96, 128, 160, 256))

CASES: tuple[Case, ...] = (*_PLAIN, *_RULES, *_DIMS)
