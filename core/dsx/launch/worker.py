"""What each rank runs: `python -u -m dsx.launch.worker`, started by the agent in `launch.py`.

It calls the launch's target and ends in one of two ways: quietly with 0, or with a failure file that says what happened
and when, by which the launcher finds the rank that failed first.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from functools import reduce
from pathlib import Path
from typing import Any, NoReturn

from dsx.errors import DsxError
from dsx.launch import stop

ROUND = "DSX_LAUNCH_ROUND"
LAUNCHER = "DSX_LAUNCHER_PID"
CALL_FILE = "call.json"
STOP_FILE = "stop"
FAILURE_FILE = "failure.json"
RESULT_FILE = "result"
HEEDS_FILE = "heeds_stop"
BEGUN_FILE = "begun"

_CALLERS = tuple(str(Path(__file__).parents[1] / part) for part in ("launch", "cli"))
_PR_SET_PDEATHSIG = 1
_EXIT_S = 10.0


def main() -> None:
    """Be one rank of a launch. The first of a host keeps the launcher's stdout and stderr, the others have files."""
    die_with_parent(int(os.environ[LAUNCHER]))
    # Ctrl-C is for the launcher. SIGTERM ends a rank at once: it is the agent's, whose ranks have lost one.
    # A handler and not SIG_IGN, which programs that the rank starts would inherit.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    folder = Path(os.environ[ROUND])
    own = rank_folder(folder, int(os.environ["RANK"]))
    own.mkdir(parents=True)
    if os.environ["LOCAL_RANK"] != "0":
        _redirect(own)
    faulthandler.enable()
    stop.follow(folder.parent / STOP_FILE, own / HEEDS_FILE)
    try:
        result = _call(json.loads((folder.parent / CALL_FILE).read_text()))
        if isinstance(result, int) and result:
            (own / RESULT_FILE).write_text(str(int(result)))
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code not in (None, 0):
            _fail(error, own)
    end()


def note_begun() -> None:
    """What ranks do once in a launch is done; `begun_before` tells those that start again."""
    if (folder := os.environ.get(ROUND)) is not None:
        (rank_folder(Path(folder), int(os.environ["RANK"])) / BEGUN_FILE).touch()


def begun_before() -> bool:
    """Whether a rank of this host came to `note_begun`, in this launch."""
    folder = os.environ.get(ROUND)
    return folder is not None and any(Path(folder).parent.glob(f"*/*/{BEGUN_FILE}"))


def rank_folder(folder: Path, rank: int) -> Path:
    """Where a rank leaves word, and its output, in the folder of a round."""
    return folder / f"rank_{rank}"


def die_with_parent(parent: int) -> None:
    """Let this process be killed when the thread that started it ends, however it ends; `parent` is its process id."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    # It may have ended before we asked.
    if os.getppid() != parent:
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _redirect(directory: Path) -> None:
    for stream, name in ((sys.stdout, "stdout.log"), (sys.stderr, "stderr.log")):
        with (directory / name).open("wb") as file:
            os.dup2(file.fileno(), stream.fileno())


def _call(call: dict[str, Any]) -> Any:
    sys.path[:] = call["search_path"]
    # The launcher's own serves to find this module; programs that the rank starts get the user's.
    os.environ.pop("PYTHONPATH", None)
    if call["PYTHONPATH"] is not None:
        os.environ["PYTHONPATH"] = call["PYTHONPATH"]
    module, _, name = call["target"].partition(":")
    function: Any = reduce(getattr, name.split("."), importlib.import_module(module))
    return function(**call["arguments"])


def _fail(error: BaseException, directory: Path) -> NoReturn:
    """Leave word of `error` and end, without any clean-up: it could wait for ranks that wait for this one."""
    now = time.time_ns()
    code = _exit_code(error)
    told = {"time_ns": now, "code": code, "rank": int(os.environ["RANK"]), **_told(error)}
    try:
        partial = directory / f"{FAILURE_FILE}.partial"
        partial.write_text(json.dumps(told))
        partial.replace(directory / FAILURE_FILE)
    except OSError:
        traceback.print_exception(error)
    _flush()
    os._exit(code)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, DsxError):
        return error.exit_code
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        # The system keeps eight bits, and a failure must not become 0.
        return error.code % 256 or 1
    return 1


def _told(error: BaseException) -> dict[str, str]:
    """The text for the user, and whether it is an `error` in full or needs a `traceback` to be of use."""
    if isinstance(error, DsxError):
        return {"error": str(error)}
    if isinstance(error, SystemExit) and isinstance(error.code, str):
        return {"error": error.code}
    return {"traceback": users_traceback(error)}


def users_traceback(error: BaseException) -> str:
    """The traceback from the user's own code on, without how dsx came to call it."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename.startswith(_CALLERS):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def end() -> NoReturn:
    """End a rank that is through, as the interpreter would but without its last part, taking the modules apart.

    Native threads of communication libraries can hang there, and a thread or exit handler of the user's can hang
    before: the work is done, so the exit code is 0 in any case, within seconds.
    """
    guard = threading.Timer(_EXIT_S, os._exit, (0,))
    guard.daemon = True
    guard.start()
    try:
        _leave_group()
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    _flush()
    os._exit(0)


def _leave_group() -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue


if __name__ == "__main__":
    main()
