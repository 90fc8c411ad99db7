"""Role `tiers`: where states rest. Many claims; parts see one store, which routes each (key, name) to its tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attrs import frozen
from torch import Tensor

Span = tuple[int, int]
"""Elements [start, stop) of a state."""


@frozen
class Kind:
    """Size, in elements, and dtype of a state."""

    size: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """What it takes."""
        return self.size * self.dtype.itemsize


class Store:
    """States by (key of a flat parameter, name), as parts see them.

    What `fetch` returns is borrowed until `put`, by one borrower; `put` gives back the states that it names and no
    other, so that a state may be borrowed while another one of the same key is. Errors of asynchronous writes are
    raised by a later call, at the latest by `drain`. A thread may walk some states while another one walks others.
    """

    def create(self, key: str, name: str, tensor: Tensor) -> None:
        """Take ownership of `tensor` as the first value of a state."""
        raise NotImplementedError

    def names(self, key: str) -> Sequence[str]:
        """States that exist for `key`, in order of creation."""
        raise NotImplementedError

    def kind(self, key: str, name: str) -> Kind:
        """What a state is like; nothing is brought near for it."""
        raise NotImplementedError

    def grain(self, key: str) -> int | None:
        """Elements of a piece in which the states of `key` are best walked; None: all at once."""
        raise NotImplementedError

    def prefetch(self, key: str, read: Sequence[str], span: Span | None = None) -> None:
        """Start bringing states near; never changes a result."""
        raise NotImplementedError

    def fetch(
        self,
        key: str,
        read: Sequence[str] = (),
        write: Sequence[str] = (),
        into: Tensor | None = None,
        span: Span | None = None,
    ) -> dict[str, Tensor]:
        """Borrow states: those in `read` with their values, those in `write` to be overwritten whole.

        into  where the single state named in `read` is to be copied, whatever its alignment; then nothing is borrowed
        span  of each of them; None: all of it
        """
        raise NotImplementedError

    def put(self, key: str, dirty: Sequence[str] = (), clean: Sequence[str] = ()) -> None:
        """Give back what is borrowed of these states of `key`; those in `dirty` were changed."""
        raise NotImplementedError

    def alternate(self, key: str, names: Sequence[str]) -> bool:
        """Take space for a second value of each of these states of `key`. False, and none is taken, where a state rests
        in a tier that has no second values."""
        raise NotImplementedError

    def aside(self, key: str, names: Sequence[str]) -> None:
        """What is put of these states becomes their second value, until `keep` or `forget`; `fetch` brings the first.
        All of each is to be put once, whole blocks of the tier at a time."""
        raise NotImplementedError

    def keep(self, key: str, names: Sequence[str]) -> None:
        """The second values take the place of the first."""
        raise NotImplementedError

    def forget(self, key: str, names: Sequence[str]) -> None:
        """The first values stay what they are."""
        raise NotImplementedError

    def drain(self) -> None:
        """Wait until everything that was put is at rest."""
        raise NotImplementedError

    def close(self) -> None:
        """Drain, and give back memory, files and threads."""
        raise NotImplementedError


class Tier(Store):
    """The null part: the memory of the device on which a state was made. Everything stays where it is.

    place  where states rest, for people: "device", "host", "disk"

    A state on the meta device has a size and no values: it is only counted.
    """

    place: str = "device"
    alternates: bool = False
    """Whether its states may have second values."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, str], Tensor] = {}

    def claims(self, name: str, size: int) -> bool:
        """Whether a state called `name`, of `size` bytes, is to rest here: then `create` follows. What the layout holds
        in place, such as parameters that are whole on every rank, is never offered."""
        return True

    def idle(self) -> str | None:
        """Asked once every state has its place: why something it was told to claim is not here, in words; None if it
        all is."""
        return None

    def room(self) -> int | None:
        """Bytes free where its states are to rest, for all ranks of this host together; None: nobody can say."""
        return None

    def footprint(self) -> int:
        """Bytes that its states take where they rest."""
        return sum(self.bytes().values())

    def reserve(self, size: int) -> None:
        """States are about to be created whose footprint is `size`: take the space for them, or raise `DsxError`."""

    def create(self, key: str, name: str, tensor: Tensor) -> None:
        self._tensors[key, name] = tensor

    def names(self, key: str) -> Sequence[str]:
        return [name for owner, name in self._tensors if owner == key]

    def kind(self, key: str, name: str) -> Kind:
        tensor = self._tensors[key, name]
        return Kind(tensor.numel(), tensor.dtype)

    def grain(self, key: str) -> int | None:
        return None

    def prefetch(self, key: str, read: Sequence[str], span: Span | None = None) -> None:
        """Nothing is far."""

    def fetch(
        self,
        key: str,
        read: Sequence[str] = (),
        write: Sequence[str] = (),
        into: Tensor | None = None,
        span: Span | None = None,
    ) -> dict[str, Tensor]:
        part = slice(*span) if span else slice(None)
        if into is not None:
            (name,) = read
            into.copy_(self._tensors[key, name][part])
            return {}
        return {name: self._tensors[key, name][part] for name in (*read, *write)}

    def put(self, key: str, dirty: Sequence[str] = (), clean: Sequence[str] = ()) -> None:
        """Changes were made in place."""

    def drain(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        self._tensors.clear()

    def bytes(self) -> Mapping[str, int]:
        """Bytes of states at rest, by name."""
        held: dict[str, int] = {}
        for (_, name), tensor in self._tensors.items():
            held[name] = held.get(name, 0) + tensor.numel() * tensor.element_size()
        return held

    def buffers(self) -> int:
        """Bytes of the host's memory that it holds besides, for what is on its way."""
        return 0
