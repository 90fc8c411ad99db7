"""Role `tiers`: where states rest. Many claims; parts see one store, which routes each (key, name) to its tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor


class Store:
    """States by (key of a flat parameter, name), as parts see them.

    What `fetch` returns is borrowed until `put`: exactly one borrower, one `put`. Errors of asynchronous writes are
    raised by the next call on that key and at `drain`.
    """

    def create(self, key: str, name: str, tensor: Tensor) -> None:
        """Take ownership of `tensor` as the first value of a state."""
        raise NotImplementedError

    def names(self, key: str) -> Sequence[str]:
        """States that exist for `key`, in order of creation."""
        raise NotImplementedError

    def prefetch(self, key: str, read: Sequence[str]) -> None:
        """Start bringing states near; never changes a result."""
        raise NotImplementedError

    def fetch(
        self, key: str, read: Sequence[str] = (), write: Sequence[str] = (), into: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Borrow states: those in `read` with their values, those in `write` to be overwritten whole.

        into  where the single state named in `read` is to be copied, whatever its alignment; then nothing is borrowed
        """
        raise NotImplementedError

    def put(self, key: str, dirty: Sequence[str]) -> None:
        """Give back everything borrowed of `key`; states named in `dirty` were changed."""
        raise NotImplementedError

    def add(self, key: str, name: str, tensor: Tensor, first: bool) -> None:
        """Add to a state, or with `first` replace it."""
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

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, str], Tensor] = {}

    def claims(self, name: str, resident: bool) -> bool:
        """Whether states called `name` rest here. `resident` ones are held in place by the layout and cannot be
        claimed."""
        return True

    def create(self, key: str, name: str, tensor: Tensor) -> None:
        self._tensors[key, name] = tensor

    def names(self, key: str) -> Sequence[str]:
        return [name for owner, name in self._tensors if owner == key]

    def prefetch(self, key: str, read: Sequence[str]) -> None:
        """Nothing is far."""

    def fetch(
        self, key: str, read: Sequence[str] = (), write: Sequence[str] = (), into: Tensor | None = None
    ) -> dict[str, Tensor]:
        if into is not None:
            (name,) = read
            into.copy_(self._tensors[key, name])
            return {}
        return {name: self._tensors[key, name] for name in (*read, *write)}

    def put(self, key: str, dirty: Sequence[str]) -> None:
        """Changes were made in place."""

    def add(self, key: str, name: str, tensor: Tensor, first: bool) -> None:
        held = self._tensors[key, name]
        _ = held.copy_(tensor) if first else held.add_(tensor)

    def drain(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        self._tensors.clear()

    def bytes(self) -> Mapping[str, int]:
        """Bytes held, by state name."""
        held: dict[str, int] = {}
        for (_, name), tensor in self._tensors.items():
            held[name] = held.get(name, 0) + tensor.numel() * tensor.element_size()
        return held
