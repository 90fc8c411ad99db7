"""Text files as a data set of token windows, each predicted one token ahead."""

from __future__ import annotations

import glob
import inspect
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from dsx.errors import DsxError
from dsx_text.cache import PREFIX, cached_tokens
from dsx_text.tokenize import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
"""Folders under the standard library that hold other packages, or tests full of made-up data."""
_PROMPT = 32
"""Tokens of held-out text that a sample continues."""


def files(
    files: str | Sequence[str] = "stdlib",
    *,
    context: int = 256,
    tokenizer: str = "bytes",
    held_out: float = 0.02,
    cache: str | None = None,
    labels: Literal["next", "same"] = "next",
    limit_bytes: int | None = None,
) -> Windows:
    """The windows of a text corpus, to train on; `.held_out` has those to evaluate on.

    files        a file, a folder (all files below it, hidden ones aside), a glob (** goes down), or a list of these;
                 "stdlib" is Python's own library: its *.py without tests and installed packages, about 12 MB.
                 They are laid end to end in the order of their paths, without a mark between them.
    context      tokens in a window
    tokenizer    "bytes", or the path of a Hugging Face tokenizer.json or of a folder that holds one
    held_out     the part of the windows, from the end of the corpus, that is kept for evaluation, in [0, 1); at least
                 one window unless it is 0. No token is in both parts.
    cache        folder of the tokens; default: dsx/tokens in $XDG_CACHE_HOME, or in ~/.cache
    labels       "next": labels[t] is the token after input_ids[t]; "same": the labels are the input_ids, for models
                 that shift them on their own, such as Hugging Face's
    limit_bytes  read at most so much of the corpus

    Raises `DsxError` if nothing matches, a file cannot be read, or there is less text than the windows need.
    """
    if type(context) is not int or context < 1:
        raise _misfit("context", context, "a whole number of at least 1")
    if not 0.0 <= held_out < 1.0:
        raise _misfit("held_out", held_out, "a number from 0 to below 1")
    if labels not in ("next", "same"):
        raise _misfit("labels", labels, '"next" or "same"')
    if limit_bytes is not None and limit_bytes < 1:
        raise _misfit("limit_bytes", limit_bytes, "a number of at least 1, or none")
    patterns = [files] if isinstance(files, str) else list(files)
    encoder = load_tokenizer(tokenizer)
    folder = Path(cache).expanduser() if cache else _default_cache()
    path = cached_tokens(_find(patterns), encoder, folder.absolute(), limit_bytes)
    return _split(path, encoder, context, labels == "same", held_out, patterns)


def _misfit(name: str, value: object, expected: str) -> DsxError:
    return DsxError(
        f"dsx_text:files cannot be built with {name} = {value!r}",
        expected=expected,
        remedy=f"change {name} in [data]",
    )


def _default_cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "dsx" / "tokens"


def _find(patterns: Sequence[str]) -> list[Path]:
    """Every file that the patterns mean, once, in the order of their paths."""
    found: set[str] = set()
    for pattern in patterns:
        matches = {os.path.abspath(path) for path in _matches(pattern) if _is_data(path)}
        if not matches:
            raise DsxError(
                f'files = "{pattern}" matches no file',
                where=f"looked in {os.getcwd()}" if not os.path.isabs(pattern) else None,
                expected='a file, a folder, a glob such as "text/**/*.txt", or "stdlib"',
                remedy="change files in [data]",
            )
        found |= matches
    if not found:
        raise _misfit("files", list(patterns), "at least one file, folder or glob")
    return [Path(path) for path in sorted(found)]


def _is_data(path: Path) -> bool:
    return path.is_file() and not path.name.startswith(PREFIX)


def _matches(pattern: str) -> Iterator[Path]:
    if pattern == "stdlib":
        return _files_below(Path(sysconfig.get_path("stdlib")), ".py", _NOT_LIBRARY)
    path = Path(pattern).expanduser()
    if path.is_dir():
        return _files_below(path)
    if path.exists():
        return iter([path])
    return map(Path, glob.iglob(str(path), recursive=True))


def _files_below(root: Path, suffix: str = "", leave_out: frozenset[str] = frozenset()) -> Iterator[Path]:
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in leave_out and not name.startswith(".")]
        yield from (Path(folder, name) for name in names if name.endswith(suffix) and not name.startswith("."))


def _split(
    path: Path, tokenizer: Tokenizer, context: int, same: bool, held_out: float, patterns: Iterable[str]
) -> Windows:
    """Cut the corpus in two; the token on the cut, a label of the first part, is not in the second."""
    tokens = path.stat().st_size // np.dtype(path.suffix[1:]).itemsize
    least = 2 * (context + 1) if held_out else context + 1
    if tokens < least:
        purpose = "a window to train on and one held out" if held_out else "one window"
        raise DsxError(
            f"the text is too short: {tokens} tokens",
            where=f"files = {', '.join(patterns)}",
            expected=f"at least {least}: {purpose}, of context = {context} tokens and the next",
            remedy="give more files, or a smaller context in [data]",
        )
    if not held_out:
        return Windows(path, 0, tokens, context, tokenizer, same)
    windows = (tokens - 2) // context
    kept = min(max(1, round(windows * held_out)), windows - 1)
    cut = (windows - kept) * context + 1
    evaluation = Windows(path, cut, tokens, context, tokenizer, same)
    return Windows(path, 0, cut, context, tokenizer, same, evaluation)


class Windows:
    """Windows of a flat file of tokens that do not overlap: a map-style data set.

    `self[i]` is {"input_ids", "labels"}, each int64 [context]. The file is mapped into memory at the first use in each
    process, so a copy in another process (forked or pickled) costs nothing.

    context   tokens in a window
    tokens    tokens in this part of the corpus
    vocab     token ids are below it
    held_out  the windows kept for evaluation, or None
    """

    def __init__(
        self,
        path: Path,
        start: int,
        stop: int,
        context: int,
        tokenizer: Tokenizer,
        same_labels: bool = False,
        held_out: Windows | None = None,
    ) -> None:
        self.context, self.tokens, self.vocab, self.held_out = context, stop - start, tokenizer.vocab, held_out
        self._path, self._start, self._tokenizer, self._same_labels = path, start, tokenizer, same_labels
        self._ids: NDArray[Any] | None = None

    def __len__(self) -> int:
        return (self.tokens - 1) // self.context

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self._ids is None:
            self._ids = np.asarray(np.memmap(self._path, dtype=self._path.suffix[1:], mode="r"))
        first = self._start + range(len(self))[index] * self.context
        window = torch.from_numpy(self._ids[first : first + self.context + 1].astype(np.int64))
        return {"input_ids": window[:-1], "labels": window[:-1] if self._same_labels else window[1:]}

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self[index] for index in range(len(self)))

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_ids": None}

    def decode(self, ids: Sequence[int] | Tensor) -> str:
        """The text of some token ids, 1-D; what is no UTF-8 becomes U+FFFD."""
        return self._tokenizer.decode(ids.tolist() if isinstance(ids, Tensor) else ids)

    def sample(self, model: nn.Module, generator: torch.Generator | None = None, tokens: int = 200) -> str:
        """A few tokens of held-out text and the model's continuation by `tokens`; "" if it has no `generate`.

        `model` is one that `dsx_text:gpt` or Hugging Face makes; it is put in evaluation mode meanwhile. `generator`
        is on the model's device; by default a new one with seed 0. Torch's own generators are left as they were.
        """
        if not callable(getattr(model, "generate", None)):
            return ""
        text = self if self.held_out is None else self.held_out
        device = next(model.parameters()).device
        prompt = text[0]["input_ids"][:_PROMPT].to(device)
        generator = generator or torch.Generator(device).manual_seed(0)
        with _evaluating(model):
            ids = _continued(model, prompt[None], tokens, generator)
        return self.decode(ids[0])


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, then each module as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _continued(model: Any, ids: Tensor, tokens: int, generator: torch.Generator) -> Tensor:
    """Call `generate` as this package's models or Hugging Face's have it; these draw from torch's own generator."""
    text: Tensor
    if "generator" in inspect.signature(model.generate).parameters:
        text = model.generate(ids, tokens, generator=generator)
    else:
        with torch.random.fork_rng(devices=[ids.device] if ids.device.type == "cuda" else []):
            torch.manual_seed(generator.initial_seed())
            text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=True)
    return text
