"""The store that parts see: routes each (key, name) to the tier that claimed it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from dsx.contracts import Kind, Span, Store, Tier
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
        size = tensor.numel() * tensor.element_size()
        tier = next(tier for tier in self._tiers if tier.claims(name, size))
        self._homes[key, name] = tier
        self._names.setdefault(key, []).append(name)
        tier.create(key, name, tensor)

    def names(self, key: str) -> Sequence[str]:
        return self._names.get(key, ())

    def kind(self, key: str, name: str) -> Kind:
        return self._homes[key, name].kind(key, name)

    def grain(self, key: str) -> int | None:
        grains = (tier.grain(key) for tier, _ in self._by_tier(key, self.names(key)))
        return min((grain for grain in grains if grain is not None), default=None)

    def prefetch(self, key: str, read: Sequence[str], span: Span | None = None) -> None:
        for tier, names in self._by_tier(key, read):
            tier.prefetch(key, names, span)

    def fetch(
        self,
        key: str,
        read: Sequence[str] = (),
        write: Sequence[str] = (),
        into: Tensor | None = None,
        span: Span | None = None,
    ) -> dict[str, Tensor]:
        if into is not None:
            return self._homes[key, read[0]].fetch(key, read, into=into, span=span)
        borrowed: dict[str, Tensor] = {}
        for tier, names in self._by_tier(key, [*read, *write]):
            mine = [n for n in names if n in read], [n for n in names if n in write]
            borrowed |= tier.fetch(key, *mine, span=span)
        return borrowed

    def put(self, key: str, dirty: Sequence[str] = (), clean: Sequence[str] = ()) -> None:
        for tier, names in self._by_tier(key, [*dirty, *clean]):
            tier.put(key, [n for n in names if n in dirty], [n for n in names if n in clean])

    def alternate(self, key: str, names: Sequence[str]) -> bool:
        homes = self._by_tier(key, names)
        able = all(tier.alternates for tier, _ in homes)
        return able and all(tier.alternate(key, own) for tier, own in homes)

    def aside(self, key: str, names: Sequence[str]) -> None:
        for tier, own in self._by_tier(key, names):
            tier.aside(key, own)

    def keep(self, key: str, names: Sequence[str]) -> None:
        for tier, own in self._by_tier(key, names):
            tier.keep(key, own)

    def forget(self, key: str, names: Sequence[str]) -> None:
        for tier, own in self._by_tier(key, names):
            tier.forget(key, own)

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
        """Bytes held, by (where, state name); what tiers hold besides as `buffer` on the host."""
        held: Counter[tuple[str, str]] = Counter()
        for tier in self._tiers:
            held.update({(tier.place, name): count for name, count in tier.bytes().items()})
            if count := tier.buffers():
                held["host", "buffer"] += count
        return dict(held)

    @property
    def claimants(self) -> Sequence[tuple[str, Tier]]:
        """Tiers with the plugins that made them."""
        return self._claimants

    def reserve(self, sizes: Sequence[int]) -> None:
        """Let each of `claimants` take the space for its states."""
        for (_, tier), size in zip(self._claimants, sizes, strict=True):
            tier.reserve(size)

    def refuse_idle_claims(self) -> None:
        """A tier that holds nothing, or not what it was told to, was named for nothing: `DsxError`."""
        used = {id(tier) for tier in self._homes.values()}
        for plugin, tier in self._claimants:
            why = tier.idle()
            if why or id(tier) not in used:
                raise DsxError(
                    f"'{plugin}' {why}" if why else f"'{plugin}' claims states that this run does not have",
                    where="[partition]",
                    found=f"states in this run: {', '.join(sorted({name for _, name in self._homes})) or 'none'}",
                    remedy=f"change its `states`, or remove '{plugin}'",
                )

    def _by_tier(self, key: str, names: Sequence[str]) -> list[tuple[Tier, list[str]]]:
        split: dict[int, tuple[Tier, list[str]]] = {}
        for name in names:
            tier = self._homes[key, name]
            split.setdefault(id(tier), (tier, []))[1].append(name)
        return list(split.values())
