"""Imports each module of a repository in a process of its own, forked from one that has torch and nothing of ours.

    python import_alone.py ROOT MODULE...

prints one JSON line for each module: what went wrong, [] if nothing did. A fresh interpreter for each would spend more
than a second on torch.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import warnings
from typing import NoReturn

SLEEPERS = ("triton", "cupy", "torch._dynamo", "torch.distributed.checkpoint")
"""Not to be loaded by an import: they take long, or look for a GPU."""

_DCP = ("archive", "background", "content", "folder", "resize", "slices", "storage", "wanted")
NEEDS = {"torch.distributed.checkpoint": _DCP}
"""Modules of dsx.checkpoint that are loaded when a checkpoint is written or read, and not before."""

KERNELS = {"triton_": "triton"}
"""Modules of dsx_kernels whose names start so are implementations by a library, loaded when they are picked; where it
is not installed they cannot be."""

LIBRARIES = ("attrs", "cattrs", "click", "pluggy", "entrypoints", "rich.progress", "tomli", "torch.distributed")
"""Loaded beforehand to save time, as they are not on trial."""


def problems(module: str) -> list[str]:
    """Import `module` with warnings as errors, and look at what that did to this process."""
    import torch

    before, own = set(sys.modules), _library(module)
    warnings.simplefilter("error")
    try:
        importlib.import_module(module)
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and error.name == own:
            return []
        return [f"{module} does not import alone: {type(error).__name__}: {error}"]
    added = {name for name in sys.modules if name not in before}
    woken = [name for name in SLEEPERS if name in added]
    found = [f"{module} imports {name}" for name in woken if name not in (*_needs(module), own)]
    if module.partition(".")[0] in ("dsx", "dsx_kernels"):
        plugins = {name.partition(".")[0] for name in added if name.startswith("dsx_")} - {"dsx_kernels"}
        found += [f"{module} imports the plugin package {name}" for name in sorted(plugins)]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found.append(f"{module} starts CUDA")
    return found


def _needs(module: str) -> list[str]:
    """Sleepers that a module may wake."""
    return [name for name, parts in NEEDS.items() if module in {f"dsx.checkpoint.{part}" for part in parts}]


def _library(module: str) -> str | None:
    """The library that a module is an implementation by."""
    package, _, name = module.rpartition(".")
    starts = (library for start, library in KERNELS.items() if name.startswith(start))
    return next(starts, None) if package.startswith("dsx_kernels") else None


def _in_child(module: str) -> NoReturn:
    try:
        os.write(1, json.dumps(problems(module)).encode() + b"\n")
    finally:
        os._exit(0)


def main(root: str, modules: list[str]) -> None:
    """Fork for one module after the other, those that may wake nothing first."""
    for library in ("torch", *LIBRARIES):
        importlib.import_module(library)
    sys.path[:0] = [os.path.join(root, folder) for folder in ("core", "plugins", "kernels")]
    with tempfile.TemporaryDirectory() as cache:
        # what one child compiles, the next need not
        sys.pycache_prefix, sys.dont_write_bytecode = cache, False
        for module in sorted(modules, key=_needs):
            for library in _needs(module):
                importlib.import_module(library)  # once, as all that follow need it
            child = os.fork()
            if child == 0:
                _in_child(module)
            _, status = os.waitpid(child, 0)
            if status:
                print(json.dumps([f"{module} ends its process: {os.waitstatus_to_exitcode(status)}"]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
