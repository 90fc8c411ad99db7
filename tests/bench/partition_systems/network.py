"""A network that nobody else uses: namespaces of Linux, which end with the processes in them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
def linked(mbit: int, latency_ms: float = 0.0) -> Iterator[list[Host]]:
    """This namespace and another, joined by a link that carries `mbit` Mbit/s each way (0: all it can), and where
    everything arrives `latency_ms` later.

    A link that is late is `delay.c`, built here: a kernel need not have netem. What it forwards takes of a processor.
    """
    with ExitStack() as stack:
        other = stack.enter_context(subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE))
        _until_moved(other.pid)
        here, there = Host(os.getpid(), (), "vA"), Host(other.pid, ("nsenter", "-t", str(other.pid), "-n"), "vB")
        if latency_ms:
            stack.enter_context(_late(other.pid, mbit, latency_ms))
        else:
            _run(["ip", "link", "add", "vA", "type", "veth", "peer", "name", "vB", "netns", str(other.pid)])
        for host, address in zip((here, there), _ADDRESSES, strict=True):
            device = ["dev", host.interface]
            _run([*host.prefix, "ip", "addr", "add", f"{address}/24", *device])
            size = ["mtu", "9000", "txqueuelen", "2000"] if latency_ms else []
            _run([*host.prefix, "ip", "link", "set", host.interface, *size, "up"])
            shape = ["root", "tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms"]
            if mbit and not latency_ms:
                _run([*host.prefix, "tc", "qdisc", "add", *device, *shape])
        yield [here, there]


@contextmanager
def _late(pid: int, mbit: int, latency_ms: float) -> Iterator[None]:
    """Interfaces vA here and vB in the namespace of a process, and between them what `delay.c` makes."""
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/delay"
        _run([os.environ.get("CC", "cc"), "-O2", "-o", program, str(Path(__file__).with_name("delay.c"))])
        words = [program, str(os.getpid()), str(pid), str(1000 * latency_ms), str(mbit)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as forwarder:
            assert forwarder.stdout is not None
            if forwarder.stdout.readline() != "ready\n":
                raise SystemExit("a link with latency needs /dev/net/tun and root")
            try:
                yield
            finally:
                forwarder.kill()


def _until_moved(pid: int) -> None:
    own = os.readlink("/proc/self/ns/net")
    while os.readlink(f"/proc/{pid}/ns/net") == own:
        time.sleep(0.01)


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True)
