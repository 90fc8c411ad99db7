"""Two hosts for a test: network namespaces of this machine, joined by a link that can be cut. Needs root and Linux."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from attrs import define, field, frozen

# Kept for benchmarks by RFC 2544, and here only inside the namespaces.
ADDRESSES = {"A": "198.18.7.1", "B": "198.18.7.2"}
ETC = Path("/etc/netns")


def missing() -> str | None:
    """Why this machine cannot make hosts, or None."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if shutil.which("ip") is None:
        return "the command ip is not installed"
    probe = subprocess.run(["ip", "netns", "add", f"dsx{os.getpid()}"], capture_output=True, text=True)
    if probe.returncode:
        return f"network namespaces cannot be made: {probe.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", f"dsx{os.getpid()}"], check=True)
    return None


@frozen
class Hosts:
    """Hosts "A" and "B", by the names of their namespaces, and a folder that both see."""

    names: dict[str, str]
    folder: Path

    def run(
        self, side: str, command: Sequence[str], output: Path, environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host, in the folder of the file to which what it writes goes."""
        with output.open("wb") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.names[side], *command],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=output.parent,
            )

    def cut(self, side: str) -> None:
        """Take a host's end of the link down."""
        _ip("-n", self.names[side], "link", "set", f"v{side}", "down")


@contextmanager
def two_hosts(folder: Path) -> Iterator[Hosts]:
    """Make them, and take them away with all that runs there."""
    names = {side: f"dsx{os.getpid()}{side}" for side in ADDRESSES}
    try:
        for name in names.values():
            _ip("netns", "add", name)
        a, b = names.values()
        _ip("link", "add", "vA", "netns", a, "type", "veth", "peer", "name", "vB", "netns", b)
        for side, name in names.items():
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "addr", "add", f"{ADDRESSES[side]}/24", "dev", f"v{side}")
            _ip("-n", name, "link", "set", f"v{side}", "up")
            _name_service(name, ADDRESSES[side])
        yield Hosts(names, folder)
    finally:
        for name in names.values():
            for pid in subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(ETC / name, ignore_errors=True)


def _name_service(name: str, address: str) -> None:
    """Real hosts know their own name, and learn soon of addresses without one."""
    folder = ETC / name
    folder.mkdir(parents=True)
    others = "".join(f"{other} host{side}\n" for side, other in ADDRESSES.items())
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n{others}")
    (folder / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def eventually(condition: Callable[[], bool], within: float) -> float:
    """Seconds until the condition holds; TimeoutError after `within`."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > within:
            raise TimeoutError(f"not within {within:g} s")
        time.sleep(0.05)
    return time.monotonic() - start


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@define
class Run:
    """A run on both hosts, in a folder of its own."""

    hosts: Hosts
    folder: Path
    options: Sequence[str]
    script: Sequence[str]
    launchers: dict[str, subprocess.Popen[bytes]] = field(factory=dict)

    def start(self, side: str) -> None:
        """Give the command on a host."""
        words = (sys.executable, "-c", "from dsx.cli import main; main()", "run", str(self.folder / "run.toml"))
        search_path = os.pathsep.join(os.path.abspath(place) for place in sys.path)
        added = {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder), "PYTHONPATH": search_path}
        command = [*words, "--rdzv-endpoint", f"{ADDRESSES['A']}:29400", *self.options, *self.script]
        self.launchers[side] = self.hosts.run(side, command, self.folder / f"{side}.txt", os.environ | added)

    def said(self, side: str) -> str:
        """What a host has written."""
        return (self.folder / f"{side}.txt").read_text(errors="replace")

    def pids(self) -> list[int]:
        """Of every rank there has been."""
        return [int(file.name.removeprefix("pid_")) for file in self.folder.glob("pid_*")]
