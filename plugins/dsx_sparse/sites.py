"""The part of every pattern: claims sites by name, and attends there."""

from __future__ import annotations

from fnmatch import fnmatchcase

from dsx.contracts import Attend, Attention, Site
from dsx.errors import DsxError, near
from dsx.plugin import Context
from dsx_sparse.pattern import Pattern


class Sparse(Attention):
    """One pattern at the sites whose names match."""

    def __init__(self, name: str, pattern: Pattern) -> None:
        from dsx_sparse.attend import attend_by  # registers operations, which imports parts of torch's compiler

        self._name, self._modules = name, pattern.modules
        self._seen: list[str] = []
        self._attend = attend_by(name, pattern)

    def claim(self, site: Site) -> bool:
        self._seen.append(site.name)
        return any(fnmatchcase(site.name, wanted) for wanted in self._modules)

    def bind(self, site: Site) -> Attend:
        return self._attend

    def refuse_idle(self, ctx: Context) -> None:
        """Raise `DsxError` for a pattern of names that matches no site."""
        for wanted in self._modules:
            if not any(fnmatchcase(name, wanted) for name in self._seen):
                raise DsxError(
                    f"no attention site of the model matches '{wanted}'",
                    where=f"[attention.{self._name}] modules",
                    found=f"sites: {', '.join(self._seen[:12])}{', ...' if len(self._seen) > 12 else ''}",
                    remedy=near(wanted, self._seen),
                )
