"""Text to token ids and back: raw bytes, or a Hugging Face tokenizer file."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dsx.errors import DsxError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BATCH = 16
"""Pieces of text encoded at once, in parallel by the library."""


class Tokenizer(Protocol):
    """What the token cache and the data set ask of a tokenizer."""

    vocab: int
    """Ids are below it."""
    identity: str
    """Equal where the same bytes give the same ids."""

    def encode(self, pieces: Iterable[bytes]) -> Iterator[NDArray[Any]]:
        """The ids of a stream of bytes, in order, as arrays of any integer dtype that holds them."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids."""


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that `name` means: "bytes", or the path of a tokenizer.json or of a folder that holds one.

    Raises `DsxError` if there is no such file, if it cannot be read, or if the `tokenizers` library is missing.
    """
    return Bytes() if name == "bytes" else HuggingFace(name)


class Bytes:
    """Each byte is a token."""

    vocab = 256
    identity = "bytes"

    def encode(self, pieces: Iterable[bytes]) -> Iterator[NDArray[Any]]:
        """See `Tokenizer`."""
        return (np.frombuffer(piece, dtype=np.uint8) for piece in pieces)

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer`; bytes that are no UTF-8 become U+FFFD."""
        return bytes(ids).decode("utf-8", errors="replace")


class HuggingFace:
    """A tokenizer.json, read by the `tokenizers` library.

    Bytes that are no UTF-8 become U+FFFD before they are encoded. No special tokens are added, and a truncation or
    padding that the file asks for is left out: it is meant for single sentences.
    """

    def __init__(self, name: str) -> None:
        text = _read(Path(name).expanduser(), name)
        try:
            from tokenizers import Tokenizer as Encoder
        except ImportError:
            raise DsxError(
                f'tokenizer = "{name}" needs the library `tokenizers`, which is not installed',
                remedy='pip install dsx-engine[hf], or tokenizer = "bytes"',
            ) from None
        try:
            self._encoder = Encoder.from_str(text)
        except Exception as error:
            raise _unusable(name, f"not what the tokenizers library reads: {error}") from error
        self._encoder.no_truncation()
        self._encoder.no_padding()
        self.vocab = 1 + max(self._encoder.get_vocab().values(), default=-1)
        if self.vocab == 0:
            raise _unusable(name, "an empty vocabulary")
        self.identity = hashlib.sha256(text.encode()).hexdigest()

    def encode(self, pieces: Iterable[bytes]) -> Iterator[NDArray[Any]]:
        """See `Tokenizer`."""
        texts = _decoded(pieces)
        while batch := list(islice(texts, _BATCH)):
            for encoding in self._encoder.encode_batch_fast(batch, add_special_tokens=False):
                yield np.array(encoding.ids, dtype=np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return str(self._encoder.decode(list(ids), skip_special_tokens=False))


def _decoded(pieces: Iterable[bytes]) -> Iterator[str]:
    """Decode a stream whose pieces may end inside a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for piece in pieces:
        yield decoder.decode(piece)
    yield decoder.decode(b"", final=True)


def _read(path: Path, name: str) -> str:
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise _unusable(name, f"no file {file}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(name, str(error)) from error


def _unusable(name: str, found: str) -> DsxError:
    return DsxError(
        f'tokenizer = "{name}" cannot be used',
        expected='"bytes", or the path of a tokenizer.json or of a folder that holds one',
        found=found,
        remedy="change tokenizer in [data]; a Hugging Face tokenizer writes the file with save_pretrained(folder)",
    )
