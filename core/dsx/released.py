"""The error for a weight that was used where a layout does not hold it whole."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dsx.errors import DsxError

_PHRASES = ("data is not allocated yet", "out of bounds for storage of size 0")
"""What torch says of a tensor whose memory was given back."""

_OURS = (os.path.dirname(torch.__file__), os.path.dirname(__file__))


@contextmanager
def explained() -> Iterator[None]:
    """What torch says of a weight that is not there becomes a `DsxError` that says what to do."""
    try:
        yield
    except RuntimeError as error:
        if not any(phrase in str(error) for phrase in _PHRASES):
            raise
        raise DsxError(
            "a weight was used outside the forward of the module that holds it",
            where=_place(error),
            found="this run's layout shards parameters: each is whole in the forward and backward of its module only",
            remedy='use it within `with engine.gathered("its.name"):`, or call the module that holds it',
        ) from error


def _place(error: RuntimeError) -> str | None:
    """The innermost line that is neither torch's nor dsx's; None in backward, which has none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OURS)]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else None
