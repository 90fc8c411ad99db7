"""What a process may use of its host, by control groups of both versions."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from dsx.host import Memory, cores, memory, memory_kills

GB = 10**9
V1 = "30 23 0:28 {root} /sys/fs/cgroup/{name} rw,relatime - cgroup cgroup rw,{name}\n"
V2 = "31 23 0:38 {root} /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n"


def host(folder: Path, cgroup: str, mounts: str, groups: Mapping[str, Mapping[str, str]], free: int = 50 * GB) -> Path:
    """A host with so many bytes free: /proc and /sys/fs/cgroup, as far as they are read."""
    files = {
        "proc/meminfo": f"MemTotal: {free // 512} kB\nMemAvailable:   {free // 1024} kB\n",
        "proc/self/cgroup": cgroup,
        "proc/self/mountinfo": "23 1 0:20 / / rw - ext4 /dev/vda rw\n" + mounts,
    }
    files |= {f"{group}/{name}": text for group, texts in groups.items() for name, text in texts.items()}
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def limited(limit: str, used: int, of_files: int = 0) -> dict[str, str]:
    stat = f"anon {used - of_files}\ninactive_file {of_files // 2}\nactive_file {of_files - of_files // 2}\n"
    return {"memory.max": f"{limit}\n", "memory.current": f"{used}\n", "memory.stat": stat}


def test_without_groups_all_of_the_host(tmp_path: Path) -> None:
    root = host(tmp_path, "", "", {}, free=7_000_000 * 1024)
    assert memory(root) == Memory(7_000_000 * 1024)
    assert cores(root) == len(os.sched_getaffinity(0))
    assert memory_kills(root) == 0


def test_this_host_says_something() -> None:
    found = memory()
    assert found is not None
    assert found.available > 0
    assert 1 <= cores() <= len(os.sched_getaffinity(0))
    assert memory_kills() >= 0


def test_a_limit_of_version_2_counts_without_pages_of_files(tmp_path: Path) -> None:
    groups = {"sys/fs/cgroup/job": limited(str(8 * GB), 5 * GB, of_files=3 * GB)}
    assert memory(host(tmp_path, "0::/job\n", V2.format(root="/"), groups)) == Memory(6 * GB, 8 * GB)


def test_no_limit_of_version_2(tmp_path: Path) -> None:
    found = memory(host(tmp_path, "0::/job\n", V2.format(root="/"), {"sys/fs/cgroup/job": limited("max", 5 * GB)}))
    assert found is not None
    assert found.limit is None


def test_a_limit_of_a_group_around_it(tmp_path: Path) -> None:
    groups = {
        "sys/fs/cgroup/pod": limited(str(4 * GB), 3 * GB),
        "sys/fs/cgroup/pod/job": limited(str(8 * GB), 2 * GB),
    }
    assert memory(host(tmp_path, "0::/pod/job\n", V2.format(root="/"), groups)) == Memory(1 * GB, 4 * GB)


def test_a_host_with_less_than_the_limit(tmp_path: Path) -> None:
    groups = {"sys/fs/cgroup/job": limited(str(64 * GB), 1 * GB)}
    root = host(tmp_path, "0::/job\n", V2.format(root="/"), groups, free=3_000_000 * 1024)
    assert memory(root) == Memory(3_000_000 * 1024)


def test_more_used_than_the_limit_leaves_nothing(tmp_path: Path) -> None:
    groups = {"sys/fs/cgroup/job": limited(str(1 * GB), 2 * GB)}  # a limit that was lowered
    assert memory(host(tmp_path, "0::/job\n", V2.format(root="/"), groups)) == Memory(0, 1 * GB)


@pytest.mark.parametrize("limit", [4 * GB, 2**63 - 4096])
def test_version_1(tmp_path: Path, limit: int) -> None:
    stat = f"inactive_file 1\nactive_file 1\ntotal_inactive_file {GB}\ntotal_active_file 0\n"
    files = {"memory.limit_in_bytes": f"{limit}\n", "memory.usage_in_bytes": f"{2 * GB}\n", "memory.stat": stat}
    mounts = V1.format(root="/", name="cpu") + V1.format(root="/", name="memory") + V2.format(root="/")
    root = host(tmp_path, "4:memory:/job\n1:cpu:/\n0::/\n", mounts, {"sys/fs/cgroup/memory/job": files})
    found = memory(root)
    assert found == (Memory(3 * GB, limit) if limit == 4 * GB else Memory(50 * GB // 1024 * 1024))


@pytest.mark.parametrize(
    ("cgroup", "mounted"),
    [("0::/\n", "/"), ("0::/kube/pod/box\n", "/kube/pod/box"), ("0::/kube/pod/box\n", "/elsewhere")],
)
def test_within_a_container_its_own_group_is_the_root(tmp_path: Path, cgroup: str, mounted: str) -> None:
    groups = {"sys/fs/cgroup": limited(str(2 * GB), 1 * GB)}
    assert memory(host(tmp_path, cgroup, V2.format(root=mounted), groups)) == Memory(1 * GB, 2 * GB)


def test_a_group_outside_of_what_is_seen_reads_nothing_above_it(tmp_path: Path) -> None:
    groups = {"sys/fs/cgroup": limited(str(2 * GB), 1 * GB), "sys/fs": limited(str(1 * GB), 1 * GB)}
    assert memory(host(tmp_path, "0::/../other\n", V2.format(root="/"), groups)) == Memory(1 * GB, 2 * GB)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu.cfs_quota_us": "100000\n", "cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu.max": "6400000 100000\n"}, None),
    ],
)
def test_cores_within_a_quota(tmp_path: Path, files: Mapping[str, str], expected: int | None) -> None:
    root = host(tmp_path, "0::/job\n", V2.format(root="/"), {"sys/fs/cgroup/job": files})
    assert cores(root) == (expected or len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("name", "text"),
    [("memory.events", "low 0\noom 3\noom_kill 2\n"), ("memory.oom_control", "oom_kill_disable 0\noom_kill 2\n")],
)
def test_kills_for_want_of_memory(tmp_path: Path, name: str, text: str) -> None:
    groups = {"sys/fs/cgroup/job": {name: text}, "sys/fs/cgroup": {name: "oom_kill 7\n"}}
    assert memory_kills(host(tmp_path, "0::/job\n", V2.format(root="/"), groups)) == 2
