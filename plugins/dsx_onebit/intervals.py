"""Updates at growing distances: when 0/1 Adam looks at the variance again, and when its ranks come together."""

from __future__ import annotations


def renews(step: int, count: int) -> bool:
    """Whether update number `step` is in T_v: 1, then `count` more at a distance of 1, `count` at 2, at 4, and so on.

    Lu et al. 2022, §6: the distance after the j-th is 2^floor(j / count).
    """
    at, gap = 1, 1
    while step > at + count * gap:
        at, gap = at + count * gap, 2 * gap
    return (step - at) % gap == 0


def meets(step: int, after: int, every: int, limit: int) -> bool:
    """Whether update number `step`, which comes after update `after`, is in T_u: the first one, and from each the
    distance that then holds: 1, twice as much every `every` updates, at most `limit` (Lu et al. 2022, §6)."""
    first = at = after + 1
    while True:
        turns = (at - first) // every
        gap = min(limit, 1 << min(turns, limit.bit_length()))
        following = at - (at - first - (turns + 1) * every) // gap * gap
        if gap == limit or step < following:
            return (step - at) % gap == 0
        at = following
