"""The store that parts see: routes each (key, name) to the tier that claimed it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from dsx.contracts import Store, Tier
from dsx.errors import DsxError


class Router(Store):
    """Tiers in manifest order, the first that claims a state holding it; the last is core's own, which takes the
    rest."""

    def __init__(self, tiers: Sequence[tuple[str, Tier]], default: Tier) -> None:
        self._claimants = tuple(tiers)
        self._tiers: list[Tier] = [*(tier for _, tier in tiers), default]
        self._homes: dict[tuple[str, str], Tier] = {}
        self._names: dict[str, list[str]] = {}

    def create(self, key: str, name: str, tensor: Tensor) -> None:
        tier = next(tier for tier in self._tiers if tier.claims(name, resident=False))
        self._homes[key, name] = tier
        self._names.setdefault(key, []).append(name)
        tier.create(key, name, tensor)

    def names(self, key: str) -> Sequence[str]:
        return self._names.get(key, ())

    def prefetch(self, key: str, read: Sequence[str]) -> None:
        for tier, names in self._by_tier(key, read):
            tier.prefetch(key, names)

    def fetch(
        self, key: str, read: Sequence[str] = (), write: Sequence[str] = (), into: Tensor | None = None
    ) -> dict[str, Tensor]:
        if into is not None:
            return self._homes[key, read[0]].fetch(key, read, into=into)
        borrowed: dict[str, Tensor] = {}
        for tier, names in self._by_tier(key, [*read, *write]):
            borrowed |= tier.fetch(key, [n for n in names if n in read], [n for n in names if n in write])
        return borrowed

    def put(self, key: str, dirty: Sequence[str]) -> None:
        for tier, names in self._by_tier(key, self.names(key)):
            tier.put(key, [name for name in names if name in dirty])

    def add(self, key: str, name: str, tensor: Tensor, first: bool) -> None:
        self._homes[key, name].add(key, name, tensor, first)

    def drain(self) -> None:
        for tier in self._tiers:
            tier.drain()

    def close(self) -> None:
        for tier in self._tiers:
            tier.close()

    def bytes(self) -> dict[str, int]:
        """Bytes held by all tiers, by state name."""
        held: dict[str, int] = {}
        for tier in self._tiers:
            for name, count in tier.bytes().items():
                held[name] = held.get(name, 0) + count
        return held

    def places(self) -> dict[tuple[str, str], int]:
        """Bytes held, by (where, state name)."""
        held: Counter[tuple[str, str]] = Counter()
        for tier in self._tiers:
            held.update({(tier.place, name): count for name, count in tier.bytes().items()})
        return dict(held)

    def refuse_idle_claims(self) -> None:
        """A tier that holds nothing was named for nothing: `DsxError`."""
        used = {id(tier) for tier in self._homes.values()}
        for plugin, tier in self._claimants:
            if id(tier) not in used:
                raise DsxError(
                    f"'{plugin}' claims states that this run does not have",
                    where="[partition]",
                    found=f"states in this run: {', '.join(sorted({name for _, name in self._homes}))}",
                    remedy=f"change its `states`, or remove '{plugin}'",
                )

    def _by_tier(self, key: str, names: Sequence[str]) -> list[tuple[Tier, list[str]]]:
        split: dict[int, tuple[Tier, list[str]]] = {}
        for name in names:
            tier = self._homes[key, name]
            split.setdefault(id(tier), (tier, []))[1].append(name)
        return list(split.values())
