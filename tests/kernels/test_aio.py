"""The file engine: what comes back is what was written, whatever lies where, and what fails ends with a clear error."""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from ctypes import c_uint8
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsx.errors import DsxError
from dsx_kernels.aio import BLOCK, PIECE, Files, aligned, missing
from dsx_kernels.aio.layout import place, sizes
from kernels.aio import noise, replace

if reason := missing():
    pytest.skip(f"no file engine here: {reason}", allow_module_level=True)

LENGTHS = (1, 4095, 4096, 4097, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 4099)
DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    made = Files(tmp_path, 8 * PIECE)
    yield made
    made.close()


def on_disk(files: Files) -> bytes:
    """What the files hold, as another program reads them."""
    files.sync()
    contents = [path.read_bytes() for path in files.paths]
    found = bytearray(files.size)
    for at in range(0, files.size, BLOCK):
        number, byte = place(at, len(contents))
        found[at : at + BLOCK] = contents[number][byte : byte + BLOCK]
    return bytes(found)


@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("folders", [1, 3])
@pytest.mark.parametrize("direct", [False, True])
def test_what_is_read_is_what_was_written(tmp_path: Path, direct: bool, folders: int, checksums: bool) -> None:
    """Every length, at a page and beside one (98), all in flight at once; and on disk, with zeros after each tail."""
    starts = [(length, start) for length in LENGTHS for start in (0, 64, 1)]
    files = Files(
        [tmp_path / str(number) for number in range(folders)],
        sum(length + 2 * BLOCK for length, _ in starts),
        direct=direct,
        checksums=checksums,
    )
    written, offset, tickets = [], BLOCK, []
    for length, start in starts:
        data = noise(length, start)
        tickets.append(files.write(offset, data))
        written.append((offset, data))
        offset += -(-length // BLOCK) * BLOCK
    for ticket in tickets:
        ticket.wait()
    expected = bytearray(files.size)
    for offset, data in written:
        expected[offset : offset + len(data)] = bytes(data.tolist())
    assert on_disk(files) == bytes(expected)
    # parts of what was written, into memory that lies otherwise
    reads = []
    for offset, data in written:
        skipped = BLOCK * random.randrange(0, 1 + len(data) // BLOCK)
        into = torch.full((len(data) - skipped + 2,), 7, dtype=torch.uint8)
        reads.append((files.read(offset + skipped, into[1:-1]), into, data[skipped:]))
    for ticket, into, data in reads:
        ticket.wait()
        assert torch.equal(into[1:-1], data)
        assert into[0] == into[-1] == 7, "memory beside the tensor was written to"
    assert files.direct == (direct,) * folders
    files.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_dtype(files: Files, dtype: torch.dtype) -> None:
    data = torch.randn(1003).to(dtype)
    files.write(BLOCK, data).wait()
    into = torch.empty_like(data)
    files.read(BLOCK, into).wait()
    assert torch.equal(into, data)


@pytest.mark.parametrize("folders", [1, 2, 3, 5])
@pytest.mark.parametrize("nbytes", [0, 1, PIECE, PIECE + 1, 7 * PIECE - BLOCK, 7 * PIECE])
def test_files_are_as_long_as_their_share(folders: int, nbytes: int) -> None:
    found = [0] * folders
    for offset in range(0, nbytes, BLOCK):
        number, byte = place(offset, folders)
        found[number] = max(found[number], byte + BLOCK)
    assert sizes(nbytes, folders) == found


def test_space_is_taken_at_once(files: Files) -> None:
    assert sum(path.stat().st_blocks * 512 for path in files.paths) >= files.size


def test_an_empty_operation_returns_at_once(files: Files) -> None:
    """94."""
    replace(files, "/dev/full")
    for ticket in (files.write(files.size, torch.empty(0)), files.read(0, torch.empty(0))):
        assert ticket.done()
        ticket.wait()
    assert files.counts == (0, 0, 0)


def test_no_file_at_all(tmp_path: Path) -> None:
    files = Files(tmp_path, 0)
    files.write(0, torch.empty(0)).wait()
    files.sync()
    files.close()


def test_traffic_is_counted_in_whole_blocks(files: Files) -> None:
    files.write(0, torch.empty(BLOCK + 1, dtype=torch.uint8)).wait()
    files.read(0, torch.empty(100, dtype=torch.uint8)).wait()
    assert files.counts._asdict() == {"bytes_read": BLOCK, "bytes_written": 2 * BLOCK, "requests": 2}
    files.close()
    assert files.counts.requests == 2


def test_threads_need_no_interpreter(files: Files) -> None:
    """95: a read ends while Python's lock is held."""
    files.write(0, aligned(BLOCK) + 7).wait()
    into = aligned(BLOCK)
    seen = c_uint8.from_address(into.data_ptr() + BLOCK - 1)
    interval, deadline = sys.getswitchinterval(), time.monotonic() + 20
    sys.setswitchinterval(1000)
    try:
        ticket = files.read(0, into)
        while seen.value != 7:
            assert time.monotonic() < deadline, "nothing was read while Python was busy"
    finally:
        sys.setswitchinterval(interval)
    ticket.wait()


def test_nothing_grows(tmp_path: Path) -> None:
    """97: 1,000 steps, each with a request that is copied and one that is not, and a hundred instances."""

    def state() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threads()

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    outside = state()
    files = Files(tmp_path, 4 * BLOCK, checksums=True)
    straight, copied = aligned(BLOCK), torch.empty(BLOCK - 1, dtype=torch.uint8)

    def steps(count: int) -> None:
        for _ in range(count):
            files.write(0, straight)
            files.write(BLOCK, copied).wait()
            files.read(BLOCK, copied).wait()
        files.sync()

    steps(100)
    before, memory = state(), resident()
    steps(1000)
    assert state() == before
    assert resident() - memory < PIECE
    files.close()
    for _ in range(100):
        Files(tmp_path, BLOCK, threads=1).close()
    assert state() == outside
    assert os.listdir(tmp_path) == []


def test_more_requests_than_the_queue_holds(tmp_path: Path) -> None:
    """What is asked for and forgotten is done all the same, in memory that nobody else refers to."""
    files = Files(tmp_path, 3000 * BLOCK)
    for number in range(3000):
        files.write(number * BLOCK, torch.full((BLOCK // 8,), number))
    files.sync()
    assert not files._engine._flying
    into = torch.empty(3000, BLOCK // 8, dtype=torch.long)
    files.read(0, into.view(-1)).wait()
    assert torch.equal(into, torch.arange(3000)[:, None].expand_as(into))
    files.close()


def test_any_thread_may_wait(files: Files) -> None:
    data, into = noise(4 * PIECE), aligned(4 * PIECE)
    files.write(0, data).wait()
    tickets = [files.read(0, into[: PIECE * number]) for number in (4, 3, 2, 1)]
    waiters = [threading.Thread(target=lambda: [ticket.wait() for ticket in tickets]) for _ in range(4)]
    for waiter in waiters:
        waiter.start()
    for waiter in waiters:
        waiter.join()
    assert all(ticket.done() for ticket in tickets) and torch.equal(into, data)


def mapping(address: int) -> str | None:
    """Flags of the mapping in which an address lies."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first:
            start, stop = (int(end, 16) for end in first.split("-"))
            inside = start <= address < stop
        elif inside and first == "VmFlags:":
            return line
    return None


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_no_request_is_slept_through(tmp_path: Path, threads: int) -> None:
    """Several ask for one transfer after another, so that the engine's threads fall asleep all the time."""
    engine, failed = Files(tmp_path, 4 * BLOCK, threads=threads), []

    def ask(number: int) -> None:
        memory = aligned(BLOCK)
        try:
            for turn in range(500):
                memory.fill_(turn % 251)
                engine.write(number * BLOCK, memory).wait()
                engine.read(number * BLOCK, memory).wait()
                assert (memory == turn % 251).all()
        except BaseException as error:
            failed.append(error)

    askers = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join(120)
    assert not any(asker.is_alive() for asker in askers) and failed == []
    engine.close()


def test_memory_starts_at_a_page_and_goes_with_its_last_view() -> None:
    memory = aligned(64 * PIECE + 1)
    address = memory.data_ptr()
    assert memory.dtype == torch.uint8 and memory.numel() == 64 * PIECE + BLOCK
    assert address % BLOCK == 0 and not memory.any()
    view = memory.view(torch.float32)[5:]
    del memory
    assert mapping(address) is not None and view.sum() == 0
    del view
    assert mapping(address) is None


def test_little_memory() -> None:
    for nbytes in (0, 1, BLOCK, BLOCK + 1, 2 * PIECE - 1):
        memory = aligned(nbytes)
        assert memory.numel() == max(1, -(-nbytes // BLOCK)) * BLOCK and memory.data_ptr() % BLOCK == 0
    with pytest.raises(ValueError, match="-1 bytes"):
        aligned(-1)


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no huge pages here")
def test_much_memory_lies_in_huge_pages() -> None:
    """Whole ones only: no more is taken than was asked for."""
    memory = aligned(5 * PIECE)
    assert memory.data_ptr() % (2 * PIECE) == 0
    flags = [mapping(memory.data_ptr() + at) for at in (0, 4 * PIECE - 1, 4 * PIECE)]
    assert [flag is not None and " hg" in flag for flag in flags] == [True, True, False]


@pytest.mark.parametrize(
    ("offset", "tensor", "words"),
    [
        (1, torch.empty(1), "have no 4 bytes from byte 1 on, or that is no multiple of 4,096"),
        (-BLOCK, torch.empty(1), "no 4 bytes from byte -4,096 on"),
        (8 * PIECE, torch.empty(1), "files of 8,388,608 bytes have no 4 bytes from byte 8,388,608 on"),
        (0, torch.empty(2, 2), r"1-D contiguous tensors on the CPU, not \[2, 2\]"),
        (0, torch.empty(4)[::2], r"not \[2\] with strides \(2,\) on cpu"),
        (0, torch.empty(4, device="meta"), "on meta"),
    ],
)
def test_what_files_do_not_take(files: Files, offset: int, tensor: Tensor, words: str) -> None:
    for start in (files.read, files.write):
        with pytest.raises(ValueError, match=words):
            start(offset, tensor)


def test_a_folder_is_made_and_stays(tmp_path: Path) -> None:
    files = Files(tmp_path / "new", BLOCK)
    home = files.paths[0].parent
    assert home.parent == tmp_path / "new" and sorted(os.listdir(home)) == ["data", "lock"]
    files.close()
    files.close()
    assert os.listdir(tmp_path / "new") == []


def test_files_go_with_their_last_reference(tmp_path: Path) -> None:
    files = Files(tmp_path, PIECE)
    files.write(0, aligned(PIECE))
    del files
    gc.collect()
    assert os.listdir(tmp_path) == []


def test_folders_that_take_no_files(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DsxError, match=r"no offload file can be made in .*/a/b: No such file") as error:
        Files(tmp_path / "a" / "b", BLOCK)
    assert error.value.remedy == "name a folder that can be written to; its parent must exist"
    with pytest.raises(DsxError, match=r"made in .*file: "):
        Files(tmp_path / "file", BLOCK)
    with pytest.raises(DsxError, match="twice"):
        Files([tmp_path, tmp_path / "x" / ".."], BLOCK)
    with pytest.raises(ValueError, match="no folder"):
        Files([], BLOCK)


def test_one_folder_of_two_fails(tmp_path: Path) -> None:
    """What was made in the other is removed."""
    (tmp_path / "one").mkdir()
    with pytest.raises(DsxError, match="No such file"):
        Files([tmp_path / "one", tmp_path / "two" / "three"], PIECE)
    assert os.listdir(tmp_path / "one") == []


def test_a_full_disk_is_found_at_once(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path)
    wanted = 2 * free.f_bavail * free.f_frsize // BLOCK * BLOCK
    with pytest.raises(DsxError) as error:
        Files(tmp_path, wanted)
    assert error.value.what == f"no offload file of {wanted:,} bytes can be made in {tmp_path}: No space left on device"
    assert error.value.expected == f"{wanted:,} bytes free"
    assert error.value.found is not None and error.value.found.endswith(" bytes free")
    assert error.value.remedy == "free space there, or name a folder on another disk"
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no filesystem in memory here")
def test_through_the_page_cache_where_it_must_be(caplog: pytest.LogCaptureFixture) -> None:
    """Told once for a folder, however many files are made there."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory(dir="/dev/shm") as folder, caplog.at_level(logging.WARNING, "dsx.kernels"):
        for _ in range(2):
            files = Files(folder, 2 * PIECE)
            assert files.direct == (False,)
            data, into = noise(PIECE + 5, 1), torch.empty(PIECE + 5, dtype=torch.uint8)
            files.write(BLOCK, data).wait()
            files.read(BLOCK, into).wait()
            assert torch.equal(into, data)
            files.close()
    (notice,) = caplog.messages
    assert notice.startswith(f"{folder}: is held in memory (tmpfs)")


def test_space_is_taken_without_the_system_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on systems that are no Linux."""
    monkeypatch.delattr(os, "posix_fallocate")
    monkeypatch.setattr("dsx_kernels.aio.disks._DIRECT", 0)
    files = Files(tmp_path, 3 * PIECE + BLOCK)
    assert files.direct == (False,) and files.paths[0].stat().st_blocks * 512 >= files.size
    assert not any(on_disk(files))
    files.close()
