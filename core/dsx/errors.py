"""Everything dsx raises on purpose.

The first line of a message says what is wrong in the user's words; then where, what was expected and found, and what to
change. The command line shows these without a traceback; `assert` is for our own mistakes only.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path

from attrs import frozen


class DsxError(Exception):
    """A condition that the user can mend.

    what      one line: what is wrong
    where     the place: a file and key, a plugin and its distribution, a parameter
    expected  what would have been right
    found     what there was instead
    remedy    what to change
    """

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        expected: str | None = None,
        found: str | None = None,
        remedy: str | None = None,
    ) -> None:
        self.what, self.where, self.expected, self.found, self.remedy = what, where, expected, found, remedy
        super().__init__(what)

    def __str__(self) -> str:
        details = (("where", self.where), ("expected", self.expected), ("found", self.found), ("remedy", self.remedy))
        return "\n".join([self.what, *(f"  {label}: {text}" for label, text in details if text)])

    def __reduce__(self) -> tuple[object, ...]:
        """Errors travel between ranks: keep every field, not only what `Exception.args` has."""
        return (_rebuild, (type(self), dict(self.__dict__)))


def _rebuild(kind: type[DsxError], fields: dict[str, object]) -> DsxError:
    error = kind.__new__(kind)
    error.__dict__.update(fields)
    Exception.__init__(error, fields.get("what"))
    return error


def near(name: str, known: Iterable[str]) -> str | None:
    """ "did you mean 'x'?" for a misspelt name, None if nothing is near."""
    found = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean '{found[0]}'?" if found else None


@frozen
class Problem:
    """One thing that is wrong in a manifest.

    key       dotted path of the key, e.g. "optimize.adamw.lr"
    what      what is wrong with it
    expected  what would be right ("a number above 0")
    nearest   the valid name that is nearest to a misspelt one
    file      the manifest, "--set", or None for a dict
    line      1-based line in `file`
    """

    key: str
    what: str
    expected: str | None = None
    nearest: str | None = None
    file: Path | str | None = None
    line: int | None = None

    def __str__(self) -> str:
        place = ":".join(str(part) for part in (self.file, self.line) if part is not None)
        text = f"{place}: {self.key}: {self.what}" if place else f"{self.key}: {self.what}"
        if self.expected:
            text += f"; expected {self.expected}"
        if self.nearest:
            text += f"; did you mean '{self.nearest}'?"
        return text


class ManifestError(DsxError):
    """Every problem of a manifest at once."""

    exit_code = 2

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        count = len(self.problems)
        super().__init__(f"the manifest has {count} problem{'s' if count != 1 else ''}")

    def __str__(self) -> str:
        return "\n".join([self.what, *(f"  {problem}" for problem in self.problems)])


class PluginNotFound(DsxError):
    """A manifest names a plugin that no installed package registers."""

    exit_code = 2


class PluginInvalid(DsxError):
    """A plugin is registered but cannot be used: it fails to import, has no descriptor, or breaks the hook contract."""

    exit_code = 2


class SlotConflict(DsxError):
    """Two plugins fill one role, or claim one state or site."""

    exit_code = 2


class CapabilityMissing(DsxError):
    """A part needs what no other part of the run offers."""

    exit_code = 2


class KernelUnavailable(DsxError):
    """An operation has no implementation for this device and dtype on this machine, or the one asked for is not
    there."""


class Halted(DsxError):
    """Training cannot go on as it is. All ranks raise it, between updates: every weight and state is that of the last
    update, and can be saved."""


class RankMismatch(DsxError):
    """Ranks disagree on what they run, or a collective that users enter was not entered by all of them."""

    def __init__(self, what: str, *, ranks: Sequence[int] = (), **details: str | None) -> None:
        super().__init__(what, **details)
        self.ranks = tuple(ranks)


class CheckpointError(DsxError):
    """A checkpoint cannot be written or read."""


class RankFailed(DsxError):
    """A rank ended with an error; `exit_code` is its own."""

    def __init__(self, what: str, *, rank: int, exit_code: int, **details: str | None) -> None:
        super().__init__(what, **details)
        self.rank, self.exit_code = rank, exit_code
