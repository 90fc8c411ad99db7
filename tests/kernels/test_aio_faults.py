"""The file engine where disks and files fail, and where it is closed."""

from __future__ import annotations

import gc
import os
import subprocess
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dsx.errors import DsxError
from dsx_kernels.aio import BLOCK, PIECE, Files, Ticket, aligned, missing, native
from kernels.aio import failing, noise, replace

if reason := missing():
    pytest.skip(f"no file engine here: {reason}", allow_module_level=True)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    made = Files(tmp_path, 8 * PIECE, checksums=True)
    yield made
    made.close()


# ---- disks and files ----


def test_a_disk_that_is_full(files: Files) -> None:
    replace(files, "/dev/full")
    error = failing(files.write(BLOCK, noise(3 * PIECE)))
    assert error.what == "an offload file cannot be written: No space left on device"
    assert error.where is not None and error.where.startswith(f"{files.paths[0]}, byte ")
    assert error.remedy == "free space there, or name a folder on another disk"


def test_a_disk_that_fails(tmp_path: Path) -> None:
    """Of two: the error names the file, and the byte in it."""
    files = Files([tmp_path / "a", tmp_path / "b"], 8 * PIECE)
    files.write(0, noise(8 * PIECE)).wait()
    replace(files, "/proc/self/mem", 1)
    error = failing(files.read(2 * PIECE + BLOCK, aligned(2 * PIECE)))
    assert error.what == "an offload file cannot be read: Input/output error"
    assert error.where == f"{files.paths[1]}, byte {PIECE:,}"
    assert error.remedy is not None and "dmesg" in error.remedy
    files.read(2 * PIECE, aligned(PIECE)).wait()
    files.close()


@pytest.fixture
def thin(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A disk that gives more space than there is behind it: its folder, and the file that it is made of."""
    behind, folder = tmp_path / "behind", tmp_path / "disk"
    behind.mkdir()
    folder.mkdir()
    device = None
    try:
        _as_root("mount", "-t", "tmpfs", "-o", "size=24m", "none", str(behind))
        with (behind / "image").open("wb") as image:
            image.truncate(64 << 20)
        _as_root("mkfs.ext4", "-q", "-F", str(behind / "image"))
        device = _as_root("losetup", "-f", "--show", str(behind / "image"))
        _as_root("mount", device, str(folder))
        yield folder, behind / "image"
    finally:
        for command in (["umount", str(folder)], ["losetup", "-d", device or ""], ["umount", str(behind)]):
            subprocess.run(command, stderr=subprocess.DEVNULL, check=False)


def _as_root(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no disk can be made here: {error}")
    return done.stdout.strip()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root, to make a disk")
def test_a_disk_that_fills_up_and_then_fails(thin: tuple[Path, Path]) -> None:
    """In the middle of a run, with all space taken before."""
    folder, image = thin
    files, data = Files(folder, 40 * PIECE), noise(PIECE)
    tickets = [files.write(number * PIECE, data) for number in range(40)]
    errors = []
    for ticket in tickets:
        try:
            ticket.wait()
        except DsxError as error:
            errors.append(error.what)
    assert 0 < len(errors) < 40
    assert set(errors) == {"an offload file cannot be written: No space left on device"}
    os.truncate(image, BLOCK)
    assert failing(files.read(0, aligned(8 * PIECE))).what == "an offload file cannot be read: Input/output error"
    files.close()
    with pytest.raises(DsxError, match=r"no offload file of .* bytes can be made in .*: No space left on device"):
        Files(image.parent, 40 * PIECE)
    assert os.listdir(image.parent) == ["image"]


@pytest.mark.parametrize("left", [2 * PIECE, 2 * PIECE + 100, 0])
def test_a_file_that_was_cut(files: Files, left: int) -> None:
    files.write(0, noise(8 * PIECE)).wait()
    os.truncate(files.paths[0], left)
    error = failing(files.read(0, aligned(3 * PIECE)))
    assert error.what == "an offload file ends too early"
    first = range(0, 3 * PIECE, PIECE) if left == 0 else [left]  # of several pieces, whichever failed first
    assert error.where in [f"{files.paths[0]}, byte {place:,}" for place in first]
    assert error.remedy is not None and "cut it" in error.remedy


def test_a_file_that_was_deleted_serves_on(files: Files) -> None:
    data, into = noise(PIECE), aligned(PIECE)
    files.write(0, data).wait()
    files.paths[0].unlink()
    files.read(0, into).wait()
    files.write(PIECE, data).wait()
    files.sync()
    assert torch.equal(into, data)


@pytest.mark.parametrize("at", [0, 4095, PIECE + 5, 2 * PIECE + 4096])
def test_a_byte_that_changed_on_disk(files: Files, at: int) -> None:
    data = noise(2 * PIECE + 4097)
    files.write(BLOCK, data).wait()
    files.sync()
    with files.paths[0].open("r+b") as file:
        file.seek(BLOCK + at)
        file.write(bytes([int(data[at]) ^ 1]))
        os.fsync(file.fileno())
    block = at // BLOCK * BLOCK
    for offset in (BLOCK, BLOCK + block):  # all, and from there on
        error = failing(files.read(offset, aligned(2 * PIECE + 4097)[: 2 * PIECE + 4097 + BLOCK - offset]))
        assert error.what == "an offload file does not hold what was written"
        assert error.where == f"{files.paths[0]}, byte {BLOCK + block:,}"
    files.write(BLOCK + block, noise(BLOCK)).wait()
    files.read(BLOCK, aligned(2 * PIECE + 4096)).wait()


def test_a_block_in_anothers_place(files: Files) -> None:
    """Right by itself, but an earlier write's, or one that lies elsewhere."""
    first, second = noise(2 * BLOCK), noise(2 * BLOCK)
    files.write(0, first).wait()
    for wrong in (first, second.roll(BLOCK)):
        files.write(0, second).wait()
        files.sync()
        with files.paths[0].open("r+b") as file:
            file.write(bytes(wrong.tolist()))
            os.fsync(file.fileno())
        failing(files.read(0, aligned(2 * BLOCK)))


def test_what_was_never_written_has_no_checksum(files: Files) -> None:
    into = noise(PIECE)
    files.read(PIECE, into).wait()
    assert not into.any()


def test_an_error_that_nobody_waited_for(files: Files) -> None:
    """It is raised by `sync`, once."""
    files.write(PIECE, aligned(BLOCK)).wait()
    replace(files, "/dev/full")
    files.write(0, aligned(BLOCK))
    with pytest.raises(DsxError, match="No space left"):
        files.sync()
    heard = files.write(0, aligned(BLOCK))
    failing(heard)
    files._engine.settle()


# ---- closing ----


def busy(files: Files) -> list[Ticket]:
    """Reads that take long, from a device that computes what it gives: more than can be done while a test looks."""
    replace(files, "/dev/urandom")
    into = aligned(8 * PIECE)
    return [files.read(0, into) for _ in range(500)]


def test_closing_cancels_what_has_not_begun(files: Files, tmp_path: Path) -> None:
    tickets = busy(files)
    files.close()
    assert failing(tickets[-1]).what == "offload files were closed before all was read and written"
    assert files.counts.bytes_read < 500 * 8 * PIECE
    assert os.listdir(tmp_path) == []


def test_a_disk_that_does_not_answer(
    files: Files, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Closing gives up in the end, and does not take away the memory that is read into."""
    monkeypatch.setattr(native, "_PATIENCE_MS", 0)
    monkeypatch.setattr(native, "CLOSING_S", -1)
    memory = weakref.ref(busy(files)[-1]._tensor)
    files.close()
    assert any("does not answer" in message for message in caplog.messages)
    with pytest.raises(DsxError, match="were closed"):
        files.read(0, aligned(BLOCK))
    gc.collect()
    assert memory() is not None


def test_closed_files(files: Files) -> None:
    done = files.write(0, noise(PIECE))
    done.wait()
    files.close()
    done.wait()
    for call in (lambda: files.read(0, aligned(BLOCK)), files.sync):
        with pytest.raises(DsxError, match="were closed"):
            call()
