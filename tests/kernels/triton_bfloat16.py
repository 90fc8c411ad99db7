"""Whether the corrected interpreter is right about bfloat16: `TRITON_INTERPRET=1 python -m kernels.triton_bfloat16`."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from dsx_kernels.cast.triton_cast import cast
from kernels.cases import BF16, same_bits
from kernels.triton_interpreter import install


@triton.jit  # type: ignore[untyped-decorator]
def _sum(one: tl.tensor, out: tl.tensor, BLOCK: tl.constexpr) -> None:
    index = tl.arange(0, BLOCK)
    value = tl.load(one + index)
    tl.store(out + index, value + value)


def main() -> None:
    install()
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BF16).float()
    middles = ((numbers.double() + numbers.roll(1).double()) / 2).float()
    far = torch.full_like(middles, 1e38)
    values = torch.cat([numbers, middles, torch.nextafter(middles, far), torch.nextafter(middles, -far)])
    found = torch.empty(len(values), dtype=BF16)
    cast(values, found)
    assert same_bits(found, values.to(BF16)), "conversion is not torch's"
    with pytest.raises(Exception) as refused:  # noqa: PT011 the interpreter wraps what a kernel raises
        _sum[(1,)](found[:16].clone(), torch.empty(16, dtype=BF16), 16)
    assert "add of bfloat16: a kernel widens what it loads" in f"{refused.value} {refused.value.__cause__}"


if __name__ == "__main__":
    main()
