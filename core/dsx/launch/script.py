"""A user's script as a rank of `dsx run`, and the manifest that it is run with."""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path

from dsx.errors import DsxError

MANIFEST = "DSX_MANIFEST"


def run_script(script: str, arguments: Sequence[str], manifest: str, overrides: Sequence[str]) -> None:
    """Run a Python file as `python script arguments...` would, in this process.

    `dsx.prepare(model)` without a manifest takes this `manifest` in it, with these `overrides`. Raises DsxError where
    the file cannot be read, and whatever the script raises.
    """
    path = Path(script)
    try:
        code = compile(path.read_bytes(), script, "exec")
    except OSError as error:
        raise DsxError("the script cannot be read", where=script, found=error.strerror) from error
    os.environ[MANIFEST] = json.dumps({"path": str(Path(manifest).absolute()), "set": list(overrides)})
    sys.argv[:] = [script, *arguments]
    sys.path[0] = str(path.resolve().parent)
    module = types.ModuleType("__main__")
    module.__file__ = script
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def run_manifest() -> tuple[str | None, Sequence[str]]:
    """The path of the manifest that this script is run with by `dsx run`, and the overrides; (None, ()) without."""
    if MANIFEST not in os.environ:
        return None, ()
    given = json.loads(os.environ[MANIFEST])
    return given["path"], given["set"]
