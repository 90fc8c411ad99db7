"""What this process may use of its host. In a container that is less than the host has: what its control groups allow
(Linux, cgroups(7)), which neither /proc/meminfo nor the number of cores tells."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from attrs import frozen

ROOT = Path("/")


@frozen
class Memory:
    """Bytes of memory of a host.

    available  that can still be taken without swapping
    limit      what a container may use in all, where that is what bounds `available`; None: the host does
    """

    available: int
    limit: int | None = None


def cores(root: Path = ROOT) -> int:
    """On which the threads of this process may run at once."""
    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quotas = (_quota(group) for group in _groups(root, "cpu"))
    return min([allowed, *(math.ceil(quota) for quota in quotas if quota is not None)])


def memory(root: Path = ROOT) -> Memory | None:
    """What is left for new tensors; None where the host does not say. Pages of files are there to be taken: the kernel
    gives them up first."""
    free = _host_memory(root)
    found = None if free is None else Memory(free)
    for group in _groups(root, "memory"):
        limit = _number(group / "memory.max") or _number(group / "memory.limit_in_bytes")
        used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes")
        if limit is None or used is None:
            continue
        stat = _table(group / "memory.stat")
        of_files = sum(stat.get(f"total_{kind}", stat.get(kind, 0)) for kind in ("inactive_file", "active_file"))
        left = max(0, limit - used + min(of_files, used))
        if found is None or left < found.available:  # no limit reads as 2**63, in pages
            found = Memory(left, limit)
    return found


def memory_kills(root: Path = ROOT) -> int:
    """How many processes the kernel has killed so far, since there was no memory left, of those that share this one's
    innermost control group. 0 where it does not say."""
    for group in _groups(root, "memory"):
        for file in ("memory.events", "memory.oom_control"):
            if (count := _table(group / file).get("oom_kill")) is not None:
                return count
    return 0


def _quota(group: Path) -> float | None:
    """Cores' worth of time."""
    words = _text(group / "cpu.max").split()
    if len(words) == 2 and words[0].isdigit():
        return int(words[0]) / int(words[1])
    quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
    return quota / period if quota and quota > 0 and period else None


def _host_memory(root: Path) -> int | None:
    lines = dict(line.split(":", 1) for line in _text(root / "proc/meminfo").splitlines() if ":" in line)
    if "MemAvailable" in lines:
        return int(lines["MemAvailable"].split()[0]) * 1024
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control group and of those around it, as far as they can be seen: all limits
    count."""
    own = dict[str, str]()
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path)
    # Of version 2, which has no names of controllers, unless a hierarchy of version 1 has taken this one.
    name = controller if controller in own else ""
    for mounted, at in _mounts(root, name):
        inside = PurePosixPath(own.get(name, "/"))
        # Within a container the path may be the host's, of which only the end can be seen, or nothing.
        inside = inside.relative_to(mounted) if inside.is_relative_to(mounted) else PurePosixPath()
        seen = root / at.relative_to("/")
        folder = seen.joinpath(*(part for part in inside.parts if part not in ("/", "..")))
        for one in (folder, *folder.parents):
            if one.is_relative_to(seen) and one.is_dir():
                yield one


def _mounts(root: Path, controller: str) -> Iterator[tuple[PurePosixPath, PurePosixPath]]:
    """Which part of a hierarchy is seen where."""
    lines = (line for line in _text(root / "proc/self/mountinfo").splitlines() if " - " in line)
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, (kind, *_, options) = before.split(" "), after.split(" ")
        wanted = kind == "cgroup" and controller in options.split(",") if controller else kind == "cgroup2"
        if wanted:
            yield PurePosixPath(fields[3]), PurePosixPath(fields[4])
            return


def _table(file: Path) -> Mapping[str, int]:
    """Lines of a name and a number."""
    pairs = (line.split() for line in _text(file).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _text(file: Path) -> str:
    """Nothing where there is no such file, or it may not be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
