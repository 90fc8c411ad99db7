"""What every pattern is: options that say, for any lengths, which keys each query may attend to."""

from __future__ import annotations

from typing import Annotated

from attrs import field, frozen

from dsx.errors import DsxError
from dsx.plugin import Range
from dsx_sparse.region import Region, Shape

BLOCK = Range("of 16, 32, 64 or 128", (16, 32, 64, 128).__contains__)


@frozen(kw_only=True)
class Pattern:
    """A pure function from lengths to a region, and the options that every pattern has.

    modules  patterns of the names of attention sites that it claims
    block    tokens of a block: 16, 32, 64 or 128. Small ones fit a pattern closely, large ones compute faster

    Its `repr` says everything that its region depends on.
    """

    modules: tuple[str, ...] = field(default=("*",), repr=False)
    block: Annotated[int, BLOCK] = 64

    def region(self, shape: Shape) -> Region:
        """The pairs that may attend in either direction; what is later than a query is cut off elsewhere if causal."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise `DsxError` for options that do not go together."""

    @property
    def one_sequence(self) -> bool:
        """Whether queries and keys have to be tokens of one sequence, as in self-attention."""
        return True

    @property
    def segmented(self) -> bool:
        """Whether a call has to bring segment ids."""
        return False


def misfit(name: str, option: str, value: object, expected: str) -> DsxError:
    """An option that does not go with the others."""
    return DsxError(
        f"{option} = {value!r} does not fit",
        where=f"[attention.{name}]",
        expected=expected,
        remedy=f"change {option}, or what it has to fit",
    )
