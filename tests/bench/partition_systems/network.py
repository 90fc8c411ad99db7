"""A network that nobody else uses: namespaces of Linux, which end with the processes in them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_INSIDE = "DSX_BENCH_NAMESPACE"
# Kept for benchmarks by RFC 2544, and here only inside the namespaces.
_ADDRESSES = ("198.18.9.1", "198.18.9.2")


@dataclass(frozen=True)
class Host:
    """Where ranks run.

    pid        of a process there
    prefix     starts a command there
    interface  the network interface that gloo takes
    """

    pid: int
    prefix: tuple[str, ...] = ()
    interface: str = "lo"

    def sent(self) -> int:
        """Bytes that have left through any interface, headers and acknowledgements included."""
        lines = Path(f"/proc/{self.pid}/net/dev").read_text().splitlines()[2:]
        return sum(int(line.partition(":")[2].split()[8]) for line in lines)


def isolate() -> bool:
    """Start this program over in a network namespace of its own; False where that cannot be."""
    if _INSIDE in os.environ:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        return True
    for flags in (["--net"], ["--map-root-user", "--net"]):
        try:
            done = subprocess.run(["unshare", *flags, "ip", "link", "set", "lo", "up"], capture_output=True)
        except FileNotFoundError:
            return False
        if done.returncode == 0:
            os.execvpe("unshare", ["unshare", *flags, *sys.orig_argv], os.environ | {_INSIDE: "1"})
    return False


@contextmanager
def linked(mbit: int) -> Iterator[list[Host]]:
    """This namespace and another, joined by a link that carries `mbit` Mbit/s each way."""
    with subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE) as other:
        _until_moved(other.pid)
        here, there = Host(os.getpid(), (), "vA"), Host(other.pid, ("nsenter", "-t", str(other.pid), "-n"), "vB")
        _run(["ip", "link", "add", "vA", "type", "veth", "peer", "name", "vB", "netns", str(other.pid)])
        for host, address in zip((here, there), _ADDRESSES, strict=True):
            device = ["dev", host.interface]
            _run([*host.prefix, "ip", "addr", "add", f"{address}/24", *device])
            _run([*host.prefix, "ip", "link", "set", host.interface, "up"])
            shape = ["root", "tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms"]
            _run([*host.prefix, "tc", "qdisc", "add", *device, *shape])
        yield [here, there]


def _until_moved(pid: int) -> None:
    own = os.readlink("/proc/self/ns/net")
    while os.readlink(f"/proc/{pid}/ns/net") == own:
        time.sleep(0.01)


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True)
