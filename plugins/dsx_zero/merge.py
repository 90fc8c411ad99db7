"""One sequence that holds several: what ranks that take different branches can all follow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def supersequence(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """A shortest sequence of which both are subsequences; by dynamic programming, O(len(one) * len(other))."""
    lengths = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]  # of the longest common subsequence of what is left
    for i in range(len(one) - 1, -1, -1):
        for j in range(len(other) - 1, -1, -1):
            same = one[i] == other[j]
            lengths[i][j] = lengths[i + 1][j + 1] + 1 if same else max(lengths[i + 1][j], lengths[i][j + 1])
    merged, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        if one[i] == other[j]:
            merged.append(one[i])
            i, j = i + 1, j + 1
        elif lengths[i + 1][j] >= lengths[i][j + 1]:
            merged.append(one[i])
            i += 1
        else:
            merged.append(other[j])
            j += 1
    return [*merged, *one[i:], *other[j:]]


def merge(sequences: Iterable[Sequence[int]]) -> list[int]:
    """A sequence that holds all of them, the same for the same input; equal ones cost nothing."""
    merged: list[int] = []
    for sequence in dict.fromkeys(tuple(sequence) for sequence in sequences):
        merged = supersequence(merged, sequence)
    return merged
