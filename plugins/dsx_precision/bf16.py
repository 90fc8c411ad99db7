"""Plugin `bf16`: parameters, activations and gradients in bfloat16, master weights and optimizer states in fp32."""

from __future__ import annotations

import torch
from attrs import frozen

from dsx.plugin import Descriptor, Fill, Part, hook
from dsx_precision.guard import guard
from dsx_precision.half import Half, HalfOptions


@frozen(kw_only=True)
class Options(HalfOptions):
    """`[precision.bf16]`.

    buffers  which floating buffers become bfloat16: those that are saved (`persistent`), `all` or `none`. Tables that
             are not saved stay as they are: angles computed from rounded frequencies (rotary embeddings) are wrong
    keep     patterns of names of modules that compute in fp32, such as "*.router": what they are given is cast to fp32,
             and what they return back to bfloat16
    """


descriptor = Descriptor(
    name="bf16",
    section="precision",
    contract=1,
    options=Options,
    fills={"dtypes": Fill(), "guard": Fill()},
    summary="bfloat16 with fp32 master weights; its range needs no loss scale",
)


@hook
def dsx_precision(options: Options) -> list[Part]:
    return [
        Part(
            "dtypes",
            build=lambda ctx: Half(ctx.model, torch.bfloat16, options.keep, "[precision.bf16] keep"),
            bind=lambda part, ctx: part.bind(ctx.model, options.buffers),
        ),
        guard(),
    ]
