"""Copies on the device of what rests in host memory."""

from __future__ import annotations

from collections import defaultdict

import torch
from attrs import frozen
from torch import Tensor

from dsx.contracts import PASSED, Event, Side, memory_of
from dsx_offload.claims import GRADIENT, PARAMETER

Place = tuple[str, str]


@frozen(eq=False)
class Loan:
    """Part of a state at home, its copy on the device, and when that is there."""

    held: Tensor
    near: Tensor
    there: Event

    def overlaps(self, other: Tensor) -> bool:
        """Whether it is of some of the same elements."""
        mine, theirs = self.held.storage_offset(), other.storage_offset()
        apart = mine + self.held.numel() <= theirs or theirs + other.numel() <= mine
        return memory_of(self.held) == memory_of(other) and not apart


class Lending:
    """Lends host memory as it lies where an update runs on the host; else, and what the layout reads and writes itself
    (parameters and gradients), as a copy on the device. Copies to and from the device run beside its own work and each
    other: a bus carries as much both ways at once. The memory of copies is the first side's.

    device     of the model
    on_device  whether updates run there
    """

    def __init__(self, device: torch.device, on_device: bool) -> None:
        self._device, self._all = device, on_device
        self._to, self._from = Side.of(device), Side.of(device)
        self._ahead: dict[Place, list[Loan]] = defaultdict(list)
        self._loans: dict[Place, list[Loan]] = defaultdict(list)

    def copies(self, name: str, held: Tensor) -> bool:
        """Whether `held`, of a state called `name`, is lent as a copy."""
        return held.device != self._device and (self._all or name in (GRADIENT, PARAMETER))

    def bring(self, key: str, name: str, held: Tensor) -> None:
        """Start the copy that a later `lend` of the same part takes."""
        if self._find(self._ahead[key, name], held) is None:
            self._ahead[key, name].append(self._copy(held, read=True))

    def lend(self, key: str, name: str, held: Tensor, read: bool) -> Tensor:
        """`held`, or a copy of it, with its values if it is to be read."""
        if not self.copies(name, held):
            return held
        ahead = self._ahead[key, name]
        if (loan := self._find(ahead, held)) is None:
            loan = self._copy(held, read)
        else:
            ahead.remove(loan)
        loan.there.wait()
        self._loans[key, name].append(loan)
        return loan.near

    def take_back(self, key: str, name: str, dirty: bool) -> Event:
        """The end of a loan; what was changed of a copy is brought home. Returned is when the host may read and write
        what was lent."""
        home = PASSED
        for loan in self._loans.pop((key, name), ()):
            home = loan.there
            if dirty:
                self._forget(key, name, loan.held)
                with self._from.beside():
                    loan.held.copy_(loan.near, non_blocking=True)
                home = self._from.mark()
                self._to.after(home)
            self._to.follow()
        return home

    def _copy(self, held: Tensor, read: bool) -> Loan:
        with self._to.beside():
            near = torch.empty_like(held, device=self._device)
            if read:
                near.copy_(held, non_blocking=True)
        return Loan(held, near, self._to.mark())

    def _forget(self, key: str, name: str, held: Tensor) -> None:
        """Copies that nobody came for have old values now."""
        for loan in [loan for loan in self._ahead.get((key, name), ()) if loan.overlaps(held)]:
            loan.there.wait()
            self._ahead[key, name].remove(loan)

    @staticmethod
    def _find(loans: list[Loan], held: Tensor) -> Loan | None:
        wanted = held.data_ptr(), held.numel()
        return next((loan for loan in loans if (loan.held.data_ptr(), loan.held.numel()) == wanted), None)
