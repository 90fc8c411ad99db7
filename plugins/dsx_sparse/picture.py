"""What `dsx explain --attention` says of a pattern: how much of the square it computes, and a picture."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from dsx_sparse.pattern import Pattern
from dsx_sparse.region import Region, Shape

LENGTHS = (1024, 4096, 16384, 65536)
_HEADS, _CELLS = 8, 32


def explain(options: Pattern) -> Iterator[str]:
    """Lines for people: blocks computed and what that saves at several lengths, causal and not, then the blocks.

    The speed-up is the ratio of blocks to those of dense attention by the same engine, for one that is bound by
    arithmetic as this is.
    """
    yield f"blocks of {options.block} tokens"
    yield f"{'tokens':>8}  {'density':>8} {'speed-up':>9}   {'causal':>8} {'speed-up':>9}"
    for tokens in LENGTHS:
        both = _share(options, tokens, causal=False), _share(options, tokens, causal=True)
        whole = (1.0, (1 + 1 / -(-tokens // options.block)) / 2)
        cells = [
            f"{share:8.2%} {dense / share if share else 1:8.1f}x" for share, dense in zip(both, whole, strict=True)
        ]
        yield f"{tokens:8}  {'   '.join(cells)}"
    tokens = _CELLS * options.block
    yield f"\nfirst head, {tokens} tokens, causal: a sign is a block, # full, + in part"
    region = _region(options, tokens, causal=True)
    for row, (touched, full) in enumerate(zip(region.touched[0], region.full[0], strict=True)):
        yield "".join(
            _sign(bool(t), bool(f), row, column) for column, (t, f) in enumerate(zip(touched, full, strict=True))
        )


def _sign(touched: bool, full: bool, row: int, column: int) -> str:
    if not touched or column > row:
        return "."
    return "#" if full and column < row else "+"


def _region(options: Pattern, tokens: int, causal: bool) -> Region:
    return options.region(Shape(_HEADS, tokens, tokens, options.block, causal))


def _share(options: Pattern, tokens: int, causal: bool) -> float:
    """Blocks in which some pair may attend, of all blocks, over all heads."""
    region = _region(options, tokens, causal)
    heads = region.touched if region.heads is None else region.touched[region.heads]
    seen: Tensor = heads.tril() if causal else heads
    return float(seen.sum()) / max(1, seen.numel())
