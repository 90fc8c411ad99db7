"""Operations at the speed of the memory bus: one folder an operation, with the same file names in each.

A caller imports an operation's public function (`from dsx_kernels.squares import squares`); which implementation runs
is picked once for each device type and dtype. `available()` says what there is on this machine, and why not the rest.
"""

from __future__ import annotations

from dsx_kernels.choice import Found, Implementation, Operation
from dsx_kernels.found import available

__all__ = ["Found", "Implementation", "Operation", "available"]
