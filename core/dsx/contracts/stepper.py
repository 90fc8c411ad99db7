"""Role `stepper`: walks the shards through the store, where and when it likes. One filler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from dsx.contracts.data import Job


class Stepper(Protocol):
    """What a stepper promises. Core's null part is `dsx.defaults.inline.Inline`.

    One that updates elsewhere or later needs `rule.silent`. A delayed one takes the gradients, writes parameters to
    staging (never the live buffer, which would be torn), and copies and publishes them in `settle`.
    """

    expects: bool = False
    """Whether it wants `expect`."""

    def settle(self) -> None:
        """Publish what an earlier `start` finished; blocking, on the engine's thread."""

    def expect(self, job: Job) -> None:
        """The window's last backward begins. This is the update that will follow if the gradients are finite and not
        clipped, every rank's micro-batches weigh the same, and the parameters that were used are those of last time.

        Called before each backward of the last micro-batch.
        """
        return

    def voting(self) -> None:
        """The window is closed, and the vote on its gradients begins: meanwhile what an update reads first may be
        brought near."""
        return

    def start(self, job: Job) -> None:
        """Make the update: each piece is fetched, updated and put back; after a shard's last piece, published."""

    def forget(self) -> None:
        """The update that was expected is not made; the gradients are about to be reset."""
        return

    def drain(self) -> None:
        """Finish and publish everything, before anything else reads or writes weights."""

    def close(self) -> None:
        """Give back threads; after `drain`."""
        return

    def bytes(self) -> Mapping[str, int]:
        """Bytes that it holds now, beside what the store and the layout hold, by what they are."""
        return {}
