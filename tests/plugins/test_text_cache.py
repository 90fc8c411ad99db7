from __future__ import annotations

import fcntl
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsx.errors import DsxError
from dsx_text import cache
from dsx_text.cache import PREFIX, cached_tokens, token_dtype
from dsx_text.tokenize import Bytes


class Counting(Bytes):
    """Bytes that say how often they were read."""

    def __init__(self, vocab: int = 256, identity: str = "counting") -> None:
        self.vocab, self.identity, self.builds = vocab, identity, 0

    def encode(self, pieces: Iterable[bytes]) -> Iterator[Any]:
        self.builds += 1
        return super().encode(pieces)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(b"a line of text\n" * 10)
    return path


def test_tokens_are_made_once_and_lie_alone_in_their_folder(text: Path, tmp_path: Path) -> None:
    tokenizer, folder = Counting(), tmp_path / "cache" / "deep"
    first = cached_tokens([text], tokenizer, folder)
    made = first.stat()
    assert cached_tokens([text], tokenizer, folder) == first
    assert tokenizer.builds == 1
    assert first.stat().st_mtime_ns == made.st_mtime_ns
    assert first.stat().st_ino == made.st_ino
    assert list(folder.iterdir()) == [first]
    assert first.read_bytes() == text.read_bytes()


def test_whatever_changes_the_tokens_changes_the_file(text: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_bytes(b"more")

    def made(*paths: Path, tokenizer: Bytes = Counting(), limit: int | None = None) -> Path:  # noqa: B008
        return cached_tokens(list(paths), tokenizer, tmp_path / "cache", limit)

    names = [
        made(text),
        made(other),
        made(text, other),
        made(other, text),
        made(text, limit=9),
        made(text, tokenizer=Counting(identity="another")),
        made(text, tokenizer=Counting(vocab=257)),
    ]
    os.utime(text, ns=(0, 1))
    names.append(made(text))
    text.write_bytes(text.read_bytes() + b"!")
    os.utime(text, ns=(0, 1))
    names.append(made(text))
    assert len(set(names)) == len(names)
    assert names[-1].read_bytes() == text.read_bytes()
    assert names[4].read_bytes() == text.read_bytes()[:9]


@pytest.mark.parametrize(("vocab", "dtype"), [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")])
def test_the_dtype_is_the_smallest_that_holds_the_vocabulary(
    text: Path, tmp_path: Path, vocab: int, dtype: str
) -> None:
    assert token_dtype(vocab) == np.dtype(dtype)
    path = cached_tokens([text], Counting(vocab), tmp_path)
    assert path.suffix == f".{dtype}"
    assert np.fromfile(path, dtype).tolist() == list(text.read_bytes())


def test_files_are_read_in_small_pieces_that_end_with_lines(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_PIECE", 20)
    endless = tmp_path / "endless"
    endless.write_bytes(bytes(100))
    pieces = list(cache._pieces([text, endless, text], None))
    assert b"".join(pieces) == text.read_bytes() + bytes(100) + text.read_bytes()
    assert max(map(len, pieces)) <= 40
    assert all(piece.endswith(b"text\n") for piece in pieces if piece[0])
    assert len(b"".join(cache._pieces([text, endless, text], 163))) == 163


RACE = """
import sys, time
from pathlib import Path
from dsx_text.cache import cached_tokens
from dsx_text.tokenize import Bytes

class Slow(Bytes):
    def encode(self, pieces):
        with open("builds", "a") as log:
            log.write("build ")
        for ids in super().encode(pieces):
            time.sleep(0.3)
            yield ids

print("ready", flush=True)
sys.stdin.readline()
path = cached_tokens([Path("text.txt")], Slow(), Path("cache"))
print(path.read_bytes() == Path("text.txt").read_bytes(), flush=True)
"""


def start(script: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": PATH},
    )


PATH = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)


def test_processes_that_start_together_share_one_build(text: Path, tmp_path: Path) -> None:
    processes = [start(RACE, tmp_path) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    results = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        results.append(process.communicate(timeout=60)[0])
    assert results == ["True\n", "True\n"]
    assert (tmp_path / "builds").read_text() == "build "
    assert len(list((tmp_path / "cache").iterdir())) == 1


KILLED = """
import os, signal
from pathlib import Path
from dsx_text.cache import cached_tokens
from dsx_text.tokenize import Bytes

class Killed(Bytes):
    def encode(self, pieces):
        yield from super().encode(pieces)
        os.kill(os.getpid(), signal.SIGKILL)

cached_tokens([Path("text.txt").absolute()], Killed(), Path("cache").absolute())
"""


def test_a_killed_build_leaves_nothing_that_counts(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start(KILLED, tmp_path)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    folder = tmp_path / "cache"
    assert {path.suffix for path in folder.iterdir()} == {".partial", ".lock"}
    begin = time.monotonic()
    path = cached_tokens([text], Bytes(), folder)
    assert path.read_bytes() == text.read_bytes()
    assert time.monotonic() - begin < 5
    assert {path.suffix for path in folder.iterdir()} == {".partial", ".uint8"}
    path.unlink()
    monkeypatch.setattr(cache, "_LEFTOVER", -1.0)
    cached_tokens([text], Bytes(), folder)
    assert list(folder.iterdir()) == [path]


def test_a_build_that_hangs_elsewhere_is_not_waited_for_beyond_patience(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cached_tokens([text], Bytes(), tmp_path)
    path.unlink()
    monkeypatch.setattr(cache, "_PATIENCE", 0.2)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        begin = time.monotonic()
        assert cached_tokens([text], Bytes(), tmp_path).read_bytes() == text.read_bytes()
    assert 0.2 <= time.monotonic() - begin < 5


def test_a_failed_build_leaves_no_file(text: Path, tmp_path: Path) -> None:
    class Failing(Bytes):
        def encode(self, pieces: Iterable[bytes]) -> Iterator[Any]:
            yield from super().encode(pieces)
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        cached_tokens([text], Failing(), tmp_path / "cache")
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} <= {".lock"}


def test_a_cache_that_cannot_be_written_is_replaced_with_a_warning(
    text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        path = cached_tokens([text], Bytes(), text / "cache")
    assert path.read_bytes() == text.read_bytes()
    assert path.name.startswith(PREFIX)
    assert f"the token cache {text / 'cache'} cannot be written" in caplog.text
    path.unlink()


def test_tokens_that_can_be_written_nowhere_are_an_error(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_private_folder", lambda: text / "private")
    with pytest.raises(DsxError, match=r"cannot be written\n(.|\n)*set cache in \[data\] to a folder with room"):
        cached_tokens([text], Bytes(), text / "cache")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "gone"):
        with pytest.raises(DsxError, match=f"cannot be read\n  where: {path}\n(.|\n)*leave it out of files"):
            cached_tokens([path], Bytes(), tmp_path / "cache")
