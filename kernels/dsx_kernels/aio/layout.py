"""Where bytes lie: in which file, and at which byte of it."""

from __future__ import annotations

BLOCK = 4096
"""Of which memory, places and lengths of direct I/O are multiples: `BLOCK` of native.cpp."""

PIECE = 1 << 20
"""Bytes that lie in one file before the next file's turn: `PIECE` of native.cpp."""


def rounded(nbytes: int) -> int:
    """`nbytes` rounded up to whole blocks."""
    return -(-nbytes // BLOCK) * BLOCK


def place(offset: int, files: int) -> tuple[int, int]:
    """The number of the file, and the byte in it, where byte `offset` of all lies."""
    piece, rest = divmod(offset, PIECE)
    return piece % files, piece // files * PIECE + rest


def sizes(nbytes: int, files: int) -> list[int]:
    """Bytes of each file, if so many lie over so many."""
    whole, rest = divmod(rounded(nbytes), PIECE)
    least, more = divmod(whole, files)
    found = [(least + (number < more)) * PIECE for number in range(files)]
    found[more] += rest
    return found
