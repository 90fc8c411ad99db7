"""The order of samples: a function of seed and global sample index only, whatever the world size."""

from __future__ import annotations

_MASK = (1 << 64) - 1
_ROUNDS = 6


def shuffled(index: int, length: int, seed: int) -> int:
    """The sample at global `index` of an endless sequence of epochs, each a permutation of range(length) of its own.

    A Feistel network over the next even number of bits, walked until it lands inside (Black & Rogaway 2002, "Ciphers
    with arbitrary finite domains"): no permutation is stored, and any index is reached at once, so a resumed run, or
    one on another world size, sees the same samples.
    """
    epoch, place = divmod(index, length)
    half = max(1, ((length - 1).bit_length() + 1) // 2)
    key = _mix(_mix(seed) + epoch)
    while True:
        place = _feistel(place, half, key)
        if place < length:
            return place


def _feistel(value: int, half: int, key: int) -> int:
    mask = (1 << half) - 1
    left, right = value >> half, value & mask
    for round_ in range(_ROUNDS):
        left, right = right, left ^ (_mix(key + (round_ << 32) + right) & mask)
    return left << half | right


def _mix(value: int) -> int:
    """splitmix64's finaliser (Steele, Lea & Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31
