"""What each process of `dsx.testing.Ranks` runs: await a call, join a group, run it, answer, leave the group."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import random
import signal
import sys
import time
import traceback
import warnings
from functools import reduce
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from dsx.launch.distributed import let_go
from dsx.launch.worker import die_with_parent
from dsx.testing.rank_process import Call, Outcome


def main(connection_handle: int, stacks_handle: int, parent: int) -> None:
    """Serve calls until the pool goes away."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for handle in (connection_handle, stacks_handle):
        os.set_inheritable(handle, False)
    faulthandler.enable(stacks_handle)
    faulthandler.register(signal.SIGUSR1, stacks_handle)
    torch.set_num_threads(1)
    # What is loaded now need not be searched at the end of every call.
    gc.freeze()
    connection = Connection(connection_handle)
    try:
        while True:
            connection.send_bytes(b"")
            call = pickle.loads(connection.recv_bytes())
            outcome = _answer(call)
            connection.send_bytes(pickle.dumps(outcome))
            # The parent answers when all ranks are through: to leave earlier would cut off what is still under way.
            connection.recv_bytes()
            if outcome.error and not dist.is_initialized():
                # A group that failed half made leaves torch's counters askew: the pool replaces this process.
                os._exit(0)
            _leave()
    except (EOFError, OSError):
        os._exit(0)


def _answer(call: Call) -> Outcome:
    try:
        return Outcome(time.time_ns(), result=pickle.dumps(_run(call)))
    except BaseException as error:
        return _failed(error)


def _run(call: Call) -> object:
    os.chdir(call.directory)
    os.environ.clear()
    os.environ.update(call.environment)
    sys.path[:] = call.search_path
    function: Any = reduce(getattr, call.function.split("."), _module(call.module, call.file))
    args, kwargs = pickle.loads(call.arguments)
    if call.group:
        dist.init_process_group("gloo")
    _seed()
    with warnings.catch_warnings():
        if call.warnings_as_errors:
            warnings.simplefilter("error")
        return function(*args, **kwargs)


def _module(name: str, file: str | None) -> Any:
    """Import by name, or, where that finds nothing or a namesake, from the file: test folders are often no packages."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if file is None or error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
    else:
        if getattr(module, "__file__", None) == file:
            return module
    assert file is not None
    return _loaded(name, file)


def _loaded(name: str, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"cannot load {name} from {file}", name=name)
    module = importlib.util.module_from_spec(spec)
    # Unpickling imports by dotted name, from the left; such a name need not stand for real packages.
    for end in (position for position, letter in enumerate(name) if letter == "."):
        sys.modules.setdefault(name[:end], ModuleType(name[:end]))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _seed() -> None:
    random.seed(0)
    torch.manual_seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)


def _failed(error: BaseException) -> Outcome:
    now = time.time_ns()
    report = "".join(traceback.format_exception(type(error), error, _own_part(error)))
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:
        pickled = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return Outcome(now, error=pickled, report=report)


def _own_part(error: BaseException) -> Any:
    """The traceback without the frames of this file, unless there is nothing else."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames or error.__traceback__


def _leave() -> None:
    groups: list[Any] = []
    if dist.is_initialized():
        groups = list(dist.distributed_c10d._world.pg_map)
        dist.destroy_process_group()
    # Groups, hooks and tensors that hang in cycles must not reach into the next call.
    gc.collect()
    let_go(groups)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
