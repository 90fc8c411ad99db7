"""`block_attention` by Triton: the start of its kernels."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from dsx_kernels.block_attention import dropout
from dsx_kernels.block_attention.engine import Call, Engine, laid_out_as, room_for
from dsx_kernels.block_attention.triton_forward import forward as _forward
from dsx_kernels.block_attention.triton_keys import grad_keys as _grad_keys
from dsx_kernels.block_attention.triton_queries import grad_queries as _grad_queries


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    out = room_for(q)
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    if out.numel():
        rows, columns = _tiles(q, call)
        arguments = _tensors(q=q, k=k, v=v, out=out) | {"lse": lse} | _rows(call)
        grid = (triton.cdiv(q.shape[2], rows), q.shape[1], q.shape[0])
        start(_forward, grid, arguments | _numbers(q, k, call), _constants(q, call, rows, columns))
    return laid_out_as(q, out), lse


def backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: Call,
    want_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    grads = {name: room_for(tensor) for name, tensor in {"grad_q": q, "grad_k": k, "grad_v": v}.items()}
    grad_bias = q.new_zeros(*q.shape[:-1], k.shape[2], dtype=torch.float32) if want_bias else None
    delta = torch.empty_like(lse)
    shared = _tensors(q=q, k=k, v=v, grad=grad) | {"lse": lse, "delta": delta} | _numbers(q, k, call)
    rows, columns = _tiles(q, call)
    constants = _constants(q, call, rows, columns)
    if q.numel():
        own = _tensors(out=out, grad_q=grads["grad_q"]) | _rows(call)
        own |= {"grad_lse": None if grad_lse is None else grad_lse.contiguous(), "grad_bias": grad_bias}
        start(_grad_queries, (triton.cdiv(q.shape[2], rows), q.shape[1], q.shape[0]), shared | own, constants)
    if k.numel():
        own = _tensors(grad_k=grads["grad_k"], grad_v=grads["grad_v"])
        layout = call.layout
        own |= {"column_offsets": layout.column_offsets, "rows": layout.rows, "entries": layout.entries}
        own |= {"key_blocks": layout.key_blocks}
        start(_grad_keys, (triton.cdiv(k.shape[2], columns), k.shape[1], k.shape[0]), shared | own, constants)
    if grad_bias is not None and call.bias is not None:
        grad_bias = grad_bias.to(call.bias.dtype)
    grad_q, grad_k, grad_v = (laid_out_as(tensor, made) for tensor, made in zip((q, k, v), grads.values(), strict=True))
    return grad_q, grad_k, grad_v, grad_bias


def start(kernel: Any, grid: tuple[int, int, int], arguments: dict[str, Any], constants: dict[str, Any]) -> None:
    """Start a kernel on the current stream of its tensors' device; it takes of the arguments what it knows."""
    taken = {name: value for name, value in arguments.items() if name in kernel.arg_names}
    with torch.cuda.device_of(arguments["q"]):  # type: ignore[no-untyped-call]
        kernel[grid](**taken, **constants, **options(constants))


def options(constants: dict[str, Any]) -> dict[str, Any]:
    """How a kernel is compiled: eight warps where rows are long, and products fused with sums."""
    return {"num_warps": 8 if constants["WIDTH"] >= 128 else 4, "num_stages": 2, "enable_fp_fusion": True}


def _tiles(q: Tensor, call: Call) -> tuple[int, int]:
    """Rows and columns of a tile, such that no pass spills registers; fp32 has no tensor cores at full precision."""
    width = _width(q)
    half = (64, 32) if width <= 128 else (32, 16)
    most = half if q.element_size() == 2 else (16, 16)
    return min(call.layout.block, most[0]), min(call.layout.block, most[1])


def _width(q: Tensor) -> int:
    return max(16, int(triton.next_power_of_2(q.shape[-1])))


def _constants(q: Tensor, call: Call, rows: int, columns: int) -> dict[str, Any]:
    return {
        "BLOCK": call.layout.block,
        "ROWS": rows,
        "COLUMNS": columns,
        "DIM": q.shape[-1],
        "WIDTH": _width(q),
        "DROP": call.dropout > 0,
    }


def _tensors(**tensors: Tensor) -> dict[str, Any]:
    """Tensors with their strides, as `_close` makes them."""
    made: dict[str, Any] = {}
    for name, tensor in tensors.items():
        made[name] = _close(tensor)
        for part, stride in zip(("batch", "head", "token"), made[name].stride(), strict=False):
            made[f"{name}_{part}"] = stride
    return made


def _close(tensor: Tensor) -> Tensor:
    """A tensor whose rows are contiguous, and near enough that places in a tile of them take 32 bits."""
    return tensor if tensor.stride(-1) == 1 and tensor.stride(-2) < 1 << 24 else tensor.contiguous()


def _rows(call: Call) -> dict[str, Any]:
    layout = call.layout
    return {"offsets": layout.offsets, "columns": layout.columns, "query_blocks": layout.query_blocks}


def _numbers(q: Tensor, k: Tensor, call: Call) -> dict[str, Any]:
    """What all kernels are told alike."""
    layout = call.layout
    segmented = layout.query_segments.shape[1] > 0 and layout.key_segments.shape[1] > 0
    bias = None if call.bias is None else _close(call.bias)
    strides = (0, 0, 0) if bias is None else bias.stride()[:3]
    return {
        "kinds": layout.kinds,
        "groups": layout.heads,
        "groups_batch": q.shape[1] if layout.heads.dim() == 2 else 0,
        "windows": layout.windows,
        "masks": layout.masks if layout.masks.numel() else None,
        "padding": None if call.key_padding is None else call.key_padding.contiguous().view(torch.uint8),
        "bias": bias,
        **{f"bias_{name}": stride for name, stride in zip(("batch", "head", "query"), strides, strict=True)},
        "query_segments": layout.query_segments if segmented else None,
        "query_segments_batch": layout.query_len if len(layout.query_segments) > 1 else 0,
        "key_segments": layout.key_segments if segmented else None,
        "key_segments_batch": layout.key_len if len(layout.key_segments) > 1 else 0,
        "bits": layout.bits if layout.bits.numel() else None,
        "queries": q.shape[2],
        "keys": k.shape[2],
        "heads": q.shape[1],
        "share": q.shape[1] // max(1, k.shape[1]),
        "scale": call.scale,
        "kept": 1 / (1 - call.dropout),
        "threshold": dropout.threshold(call.dropout),
        "seed": call.seed & dropout.MASK,
    }


ENGINE = Engine(forward, backward)
