"""Which rank failed first, why, and with what exit code."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

import attrs
from attrs import frozen

from dsx.errors import RankFailed
from dsx.launch.worker import FAILURE_FILE, rank_folder

_TAIL_CHARACTERS = 4000
_ECHOES = {
    "Timed out waiting": "waited for another rank in vain",
    "Connection closed by peer": "lost another rank",
    "Connection reset by peer": "lost another rank",
    "Broken pipe": "lost another rank",
}
"""What gloo says, and what it means: the error is that of a rank it was talking to, or of the link between them."""


_STARVED = "`dsx plan` says what a rank takes; fewer samples in a micro-batch, or another [partition], take less"
_REMEDY = "look for a host that is gone, a link that is cut, or a rank that hangs; --timeout is how long ranks wait"


@frozen
class Ended:
    """A rank that ended with an error, as its parent saw it.

    exit_code  as a shell has it: 128 + n for signal n
    time_s     when that was noticed, in whole seconds since the epoch
    """

    exit_code: int
    time_s: int


@frozen
class Failure:
    """What a failing rank wrote: `error` is for the user as it stands, `traceback` is an exception's."""

    rank: int
    code: int
    time_ns: int
    error: str | None = None
    traceback: str | None = None

    @property
    def echo(self) -> str | None:
        """How the loss of another rank showed in this one, if its error tells of that and not of its own."""
        last = (self.traceback or "").strip().rpartition("\n")[2]
        return next((words for phrase, words in _ECHOES.items() if phrase in last), None)


@frozen
class Losses:
    """What hosts know of their ranks that failed, by rank.

    ended     as their parents saw them, in the order noticed
    failures  what they wrote of it
    places    folders with their output
    outputs   the end of what they wrote to stderr, where that did not go to a terminal
    starved   those that were killed (SIGKILL) where the kernel ended somebody for want of memory
    """

    ended: Mapping[int, Ended]
    failures: Mapping[int, Failure]
    places: Mapping[int, str]
    outputs: Mapping[int, str]
    starved: Sequence[int] = ()

    @classmethod
    def of(cls, ended: Mapping[int, Ended], folder: Path, host: str, starved: bool = False) -> Losses:
        """Those of this host's ranks that have their folders in `folder`; `starved` is whether the kernel has
        ended somebody here for want of memory since they began."""
        told = [Failure(**json.loads(file.read_text())) for file in folder.glob(f"*/{FAILURE_FILE}")]
        failures = {failure.rank: failure for failure in told}
        folders = {rank: rank_folder(folder, rank) for rank in {*ended, *failures}}
        return cls(
            ended,
            failures,
            {rank: f"{host}:{own}" if host else str(own) for rank, own in folders.items()},
            {rank: _tail(own / "stderr.log") for rank, own in folders.items()},
            [rank for rank, end in ended.items() if starved and end.exit_code == 128 + signal.SIGKILL],
        )

    @classmethod
    def merged(cls, texts: Sequence[str]) -> Losses:
        """Those of all hosts whose `to_json` is given."""
        hosts = [json.loads(text) for text in texts]

        def every(field: str, kind: Any) -> dict[int, Any]:
            return {int(rank): kind(value) for host in hosts for rank, value in host[field].items()}

        return cls(
            every("ended", lambda value: Ended(**value)),
            every("failures", lambda value: Failure(**value)),
            every("places", str),
            every("outputs", str),
            [rank for host in hosts for rank in host["starved"]],
        )

    def __bool__(self) -> bool:
        """Whether any failed."""
        return bool(self.ended or self.failures)

    def to_json(self) -> str:
        """For `merged` on another host."""
        return json.dumps(attrs.asdict(self))


def blamed(ended: Mapping[int, Ended], failures: Mapping[int, Failure]) -> int:
    """The rank that failed first.

    A rank that died without a word (killed, or gone through os._exit) comes before ranks that tell of an error, which
    may be its loss; not so one ended by SIGTERM, or much later by SIGKILL: that was the agent. Ranks that tell of the
    loss of another come last, whatever the clocks of their hosts say.
    """
    first_word_s = min((failure.time_ns / 1e9 for failure in failures.values()), default=float("inf"))
    silent = [
        rank
        for rank, end in ended.items()
        if rank not in failures and end.exit_code != 128 + signal.SIGTERM and end.time_s <= first_word_s + 2
    ]
    if silent:
        return min(silent, key=lambda rank: ended[rank].time_s)
    if not failures:
        return min(ended, key=lambda rank: ended[rank].time_s)
    return min(failures, key=lambda rank: (failures[rank].echo is not None, failures[rank].time_ns))


def rank_failed(losses: Losses) -> RankFailed:
    """The error that names the rank that failed first, with its traceback and the end of its output."""
    rank = blamed(losses.ended, losses.failures)
    failure = losses.failures.get(rank)
    if failure is not None and failure.error is not None:
        same = [other for other, its in sorted(losses.failures.items()) if its.error == failure.error]
        who = f"rank {rank}" if len(same) == 1 else f"ranks {', '.join(map(str, same))}"
        return RankFailed(f"{who}: {failure.error}", rank=rank, exit_code=failure.code)
    code = failure.code if failure is not None else losses.ended[rank].exit_code
    told = [failure.traceback if failure is not None else None, losses.outputs[rank]]
    return RankFailed(
        f"rank {rank} was killed for want of memory (SIGKILL, exit code {code})"
        if rank in losses.starved
        else f"rank {rank} {_ending(code, failure)}",
        rank=rank,
        exit_code=code,
        where=losses.places[rank],
        found="".join("\n" + indent(text.rstrip(), "    ") for text in told if text) or None,
        remedy=_STARVED if rank in losses.starved else _REMEDY if failure is not None and failure.echo else None,
    )


def _ending(code: int, failure: Failure | None) -> str:
    if failure is not None:
        return f"{failure.echo} (exit code {code})" if failure.echo else f"failed with exit code {code}"
    if code > 128:
        try:
            return f"was killed by {signal.Signals(code - 128).name} (exit code {code})"
        except ValueError:
            pass
    return f"ended with exit code {code}, without an exception"


def _tail(file: Path) -> str:
    """The end of what a rank wrote, where that did not go to the terminal."""
    return file.read_text(errors="replace")[-_TAIL_CHARACTERS:].strip() if file.exists() else ""
