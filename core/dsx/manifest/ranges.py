"""What a number or text of the manifest may be, beyond its type.

    lr: Annotated[float, positive] = 1e-3
    betas: tuple[Annotated[float, fraction], Annotated[float, fraction]] = (0.9, 0.999)

They are checked while the table is read, not when the class is made: attrs validators run only once every field of a
class is right, and would hide problems behind each other.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from attrs import frozen

from dsx.manifest.words import quoted


@frozen
class Range:
    """A condition on a value, as an annotation: `Annotated[int, Range("above 0", lambda value: value > 0)]`.

    words   follows the words of the type in messages: "a whole number" + "above 0"
    test    whether a value of the right type is in the range
    names   the names to search when a misspelt one was given
    """

    words: str
    test: Callable[[Any], bool]
    names: tuple[str, ...] = ()


positive = Range("above 0", lambda value: bool(value > 0))
non_negative = Range("of 0 or more", lambda value: bool(value >= 0))
fraction = Range("from 0 to below 1", lambda value: 0 <= value < 1)
unit_interval = Range("from 0 to 1", lambda value: 0 <= value <= 1)
non_empty = Range("that is not empty", bool)
distinct = Range("and different from the others", lambda values: len(set(values)) == len(values))

_REFERENCE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
reference = Range('of the form "module:callable"', lambda text: _REFERENCE.fullmatch(text) is not None)


def choice(*names: str) -> Range:
    """One of `names`, for a name that is misspelt the nearest of them is offered."""
    return Range(f"out of {', '.join(map(quoted, names))}", names.__contains__, names)
