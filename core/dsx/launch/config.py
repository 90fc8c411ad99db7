"""How ranks are started."""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

from dsx.errors import DsxError

ENDING_S = 5.0
"""What the launchers of all hosts need to learn that a rank has given up, to agree whose fault it was, and to end."""


def exchange_s(timeout_s: float) -> float:
    """Seconds that a rank waits in a collective, so that over a cut link everything has ended within `timeout_s`."""
    return max(1.0, timeout_s - ENDING_S)


@frozen(kw_only=True)
class LaunchConfig:
    """How ranks are started.

    nproc         ranks on this host
    min_hosts     hosts without which the run does not start
    max_hosts     hosts that may take part: more than `min_hosts` may join while it runs
    endpoint      "host:port" of the host that all others can reach and that stays to the end; needed by several hosts
    local_addr    this host as the others reach it; None: the address that leads to `endpoint`
    max_restarts  how often all ranks start again after one failed or, with a range of hosts, a host was lost
    timeout_s     seconds within which a run whose ranks or hosts do not reach each other has ended
    log_dir       where a folder is made for the launch, with each rank's failure and the output of ranks other than
                  the first of a host; None: a temporary one, kept only after a failure
    grace_s       seconds from SIGTERM to SIGKILL for ranks that are told to end; at least 3, by which the launcher
                  knows a rank that the agent killed from one that died first

    Raises DsxError for what cannot be.
    """

    nproc: int
    min_hosts: int = 1
    max_hosts: int = 1
    endpoint: str | None = None
    local_addr: str | None = None
    max_restarts: int = 0
    timeout_s: float = 600
    log_dir: Path | None = None
    grace_s: int = 3

    def __attrs_post_init__(self) -> None:
        if self.nproc < 1:
            raise DsxError("the number of ranks must be at least 1", where="nproc", found=str(self.nproc))
        if not 1 <= self.min_hosts <= self.max_hosts:
            raise DsxError(
                "the number of hosts must be at least 1, and a range must rise",
                where="nnodes",
                found=f"{self.min_hosts}:{self.max_hosts}",
            )
        if self.max_hosts > 1 and self.endpoint is None:
            raise DsxError(
                "several hosts need a place to meet",
                where="rdzv-endpoint",
                remedy="give all of them the same --rdzv-endpoint HOST:PORT, a port that is free on one of the hosts",
            )
        if self.timeout_s < 1:
            raise DsxError("the timeout must be at least a second", where="timeout", found=f"{self.timeout_s:g} s")

    @property
    def several_hosts(self) -> bool:
        """Whether ranks of other hosts may take part."""
        return self.endpoint is not None

    @property
    def elastic(self) -> bool:
        """Whether ranks may be started more than once in this launch."""
        return self.max_restarts > 0 or self.min_hosts != self.max_hosts
