"""The counter of bytes as a plugin."""

from __future__ import annotations

from dsx.counting import Counting
from dsx.plugin import Context, Descriptor, Fill, Part, hook


class CountingPlugin:
    """For `dsx.prepare(..., plugins={"counting": CountingPlugin()})` with "counting" in [communicate]."""

    descriptor = Descriptor(
        name="counting",
        section="communicate",
        contract=1,
        fills={"wrappers": Fill()},
        summary="counts bytes by purpose",
    )

    @hook
    def dsx_communicate(self) -> list[Part]:
        def build(ctx: Context) -> type[Counting]:
            return Counting

        return [Part("wrappers", build)]
