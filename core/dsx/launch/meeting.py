"""Where the hosts of a run find each other. Importing it is slow: import it late."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Thread
from typing import TypeVar

from attrs import define
from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from dsx.errors import DsxError
from dsx.launch.config import LaunchConfig, exchange_s

_T = TypeVar("_T")

_PORT = 29400
_ANSWER_S = 20.0
_SETTINGS = {
    # A host that has not been heard of for six seconds is lost. Fewer have torn runs in two while a host joined.
    "keep_alive_interval": 1,
    "keep_alive_max_attempt": 6,
    "last_call_timeout": 2,
}


@define
class Meeting:
    """The hosts' meeting, as this host takes part in it.

    handler   torch's
    endpoint  "host:port" where all find it
    address   this host as the others reach it
    lost      whether it cannot be reached any more: then it is left without a farewell, which would only wait
    """

    handler: RendezvousHandler
    endpoint: str
    address: str
    lost: bool = False


@contextmanager
def meet(config: LaunchConfig, run_id: str) -> Iterator[Meeting]:
    """Take part in the meeting at the launch's endpoint, or in one of this host alone, and close it at the end.

    The host that the endpoint names serves it. Raises DsxError where it cannot be reached.
    """
    host, port = _endpoint(config.endpoint) if config.endpoint is not None else ("localhost", 0)
    endpoint = f"{host}:{port}"
    store = _store(host, port, config)
    address = config.local_addr or (_address(host, port) if config.several_hosts else host)
    parameters = RendezvousParameters(
        "c10d",
        endpoint,
        run_id,
        config.min_hosts,
        config.max_hosts,
        local_addr=address,
        join_timeout=max(1, int(config.timeout_s)),
        **_SETTINGS,
    )
    meeting = Meeting(create_handler(store, C10dRendezvousBackend(store, run_id), parameters), endpoint, address)
    try:
        yield meeting
    finally:
        if not meeting.lost:
            meeting.handler.shutdown()


def _endpoint(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(_PORT)
    host = host.strip("[]")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise DsxError("--rdzv-endpoint is not HOST:PORT", found=repr(text), expected=f"such as node1:{_PORT}")
    return host, int(port)


def _store(host: str, port: int, config: LaunchConfig) -> TCPStore:
    serve = not config.several_hosts or _is_free_here(host, port)
    wait = timedelta(seconds=config.timeout_s)
    try:
        store = _soon(config.timeout_s, lambda: TCPStore(host, port, is_master=serve, multi_tenant=True, timeout=wait))
    except (DistError, TimeoutError) as error:
        raise DsxError(
            f"no answer within {config.timeout_s:g} s where the hosts of this run meet",
            where=f"{host}:{port}",
            found=str(error).partition("\n")[0] or None,
            remedy="start `dsx run` on the host that --rdzv-endpoint names; let its port through to the others",
        ) from error
    answer_s = min(_ANSWER_S, exchange_s(config.timeout_s))
    store.set_timeout(timedelta(seconds=answer_s))
    _end_dead_links(store.port, answer_s)
    return store


def _soon(seconds: float, make: Callable[[], _T]) -> _T:
    """What `make` returns, or TimeoutError: a store that waits for its server is deaf to Ctrl-C, this thread is not."""
    made: Future[_T] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    Thread(target=run, daemon=True).start()
    return made.result(seconds + 1)


def _end_dead_links(port: int, seconds: float) -> None:
    """Let this process's connections to `port` fail when nothing comes back for so long.

    The store's own timeout ends in a question to the server, whose answer it awaits without one: over a link that is
    cut, that takes the system's quarter of an hour.
    """
    if sys.platform != "linux":
        return
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                _end_if_dead(int(name), port, seconds)


def _end_if_dead(descriptor: int, port: int, seconds: float) -> None:
    with socket.socket(fileno=os.dup(descriptor)) as link:
        if link.family in (socket.AF_INET, socket.AF_INET6) and link.getpeername()[1] == port:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)


def _is_free_here(host: str, port: int) -> bool:
    """Whether the address is this host's and nobody serves it yet. Asked of the network: names need not resolve."""
    try:
        ((family, kind, protocol, _, address), *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise DsxError("the name in --rdzv-endpoint is not known here", where=host, found=str(error)) from error
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            probe.bind(address)
            return True
    return False


def _address(host: str, port: int) -> str:
    """This host's address on the way to `host`; nothing is sent."""
    ((family, kind, protocol, _, address), *_) = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        found: str = probe.getsockname()[0]
        return found
