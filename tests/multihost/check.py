"""Launching on two hosts: what happens to hosts, ranks and the link between them, and how soon the run goes on.

python tests/multihost/check.py [CASE...]    about three minutes; root and Linux, see hosts.py
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hosts import Hosts, Run, alive, eventually, missing, two_hosts
from safetensors.torch import load_file

WALK = str(Path(__file__).with_name("walk.py"))
START_S = 60


class Walk:
    """A run of walk.py and its log."""

    def __init__(self, hosts: Hosts, options: Sequence[str], *failing: int) -> None:
        folder = Path(tempfile.mkdtemp(dir=hosts.folder))
        (folder / "run.toml").write_text('[run]\nname = "walk"\n')
        script = (WALK, str(folder), *(str(number) for number in failing))
        self.run, self.folder = Run(hosts, folder, options, script), folder

    def start(self, *sides: str) -> Walk:
        for side in sides:
            self.run.start(side)
        return self

    def log(self) -> list[tuple[float, int, float, int]]:
        """Time, step, value and world size of each step so far; a line that is being written is left out."""
        log = self.folder / "log"
        whole = log.read_text().rpartition("\n")[0] if log.exists() else ""
        return [tuple(json.loads(line)) for line in whole.splitlines()]

    def walking(self, world: int, since: float = 0, within: float = START_S) -> float:
        """Seconds from `since` to the first step of a world of this size that was started after it."""

        def steps() -> list[float]:
            return [at for at, _, _, size in self.log() if at > since and size == world]

        try:
            eventually(lambda: len(steps()) > 2, within)
        except TimeoutError:
            raise AssertionError(f"no steps of {world} ranks\nA: {self.run.said('A')}\n{self.log()[-3:]}") from None
        return steps()[0] - since

    def is_one_curve(self) -> bool:
        """Whether every step, some done twice, has the value that an undisturbed walk has."""
        found = [(step, value) for _, step, value, _ in self.log()]
        value, values = 1.0, {}
        for step in range(1, max(found)[0] + 1):
            value = values[step] = (value * 1.000_1 + (step - 1)) % 1000
        return set(found) == set(values.items())

    def error(self, side: str) -> str:
        """The first line of the error that a host has shown."""
        said = self.run.said(side)
        return next((line for line in said.splitlines() if line.startswith("error: ")), f"no error in {said}")

    def rank_pid(self, rank: int) -> int:
        return next(pid for pid in self.run.pids() if (self.folder / f"pid_{pid}").read_text() == str(rank))

    def ends(self, side: str, within: float) -> int:
        return self.run.launchers[side].wait(timeout=within)

    def none_alive(self, within: float) -> float:
        return eventually(lambda: not any(alive(pid) for pid in self.run.pids()), within)


def killed_worker(hosts: Hosts) -> str:
    walk = Walk(hosts, ["--nnodes", "2", "--max-restarts", "3"]).start("A", "B")
    walk.walking(2)
    seconds = _killed(walk, walk.rank_pid(1), world=2, limit=6)
    assert walk.is_one_curve()
    assert "rank 1 was killed by SIGKILL (exit code 137)" in walk.run.said("B")
    return f"went on after {seconds:.1f} s of 6"


def lost_host(hosts: Hosts) -> str:
    walk = Walk(hosts, ["--nnodes", "1:2", "--max-restarts", "3"]).start("A", "B")
    walk.walking(2)
    seconds = _killed(walk, walk.run.launchers["B"].pid, world=1, limit=12)
    assert walk.is_one_curve()
    return f"went on after {seconds:.1f} s of 12"


def _killed(walk: Walk, pid: int, world: int, limit: float) -> float:
    """Seconds from a kill to the first step of the ranks that were started after it."""
    before, at = set(walk.run.pids()), time.time()
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: set(walk.run.pids()) > before, START_S)
    started = min((walk.folder / f"pid_{new}").stat().st_mtime for new in set(walk.run.pids()) - before)
    seconds = started - at + walk.walking(world, since=started)
    assert seconds < limit, f"{seconds:.1f} s, {limit} wanted"
    return seconds


def silent_host(hosts: Hosts) -> str:
    walk = Walk(hosts, ["--nnodes", "1:2", "--max-restarts", "3", "--timeout", "30"]).start("A", "B")
    walk.walking(2)
    at = time.time()
    hosts.cut("B")
    seconds = walk.walking(1, since=at)
    assert walk.is_one_curve()
    assert seconds < 12, f"{seconds:.1f} s, 12 wanted"
    assert walk.ends("B", 35) == 1
    return f"the other went on after {seconds:.1f} s of 12"


def joining_host(hosts: Hosts) -> str:
    walk = Walk(hosts, ["--nnodes", "1:2"]).start("A")
    walk.walking(1)
    at = time.time()
    walk.start("B")
    seconds = walk.walking(2, since=at)
    assert walk.is_one_curve()
    assert seconds < 8, f"{seconds:.1f} s, 8 wanted"
    assert "all ranks start again: 2 on 2 hosts" in walk.run.said("A")
    return f"took part after {seconds:.1f} s of 8"


def cut_link(hosts: Hosts) -> str:
    walk = Walk(hosts, ["--nnodes", "2", "--timeout", "15"]).start("A", "B")
    walk.walking(2)
    at = time.monotonic()
    hosts.cut("B")
    for side in ("A", "B"):
        assert walk.ends(side, 30) == 1
    seconds = time.monotonic() - at
    walk.none_alive(1)
    assert seconds < 15, f"{seconds:.1f} s with a timeout of 15"
    return f"ended after {seconds:.1f} s with a timeout of 15\n    A: {walk.error('A')}\n    B: {walk.error('B')}"


def killed_launcher(hosts: Hosts) -> str:
    walk = Walk(hosts, ["--nnodes", "2"]).start("A", "B")
    walk.walking(2)
    walk.run.launchers["A"].kill()
    seconds = walk.none_alive(5)
    assert walk.ends("B", 10) == 1
    return f"no rank after {seconds:.1f} s of 5\n    B: {walk.error('B')}"


def failing_rank(hosts: Hosts) -> str:
    walk = Walk(hosts, ["--nnodes", "2"], 1, 5).start("A", "B")
    codes = [walk.ends(side, START_S) for side in ("A", "B")]
    for side in ("A", "B"):
        said = walk.run.said(side)
        assert "error: rank 1 failed with exit code 1" in said and "that the check asked for" in said, said
    assert codes == [1, 1]
    walk.none_alive(1)
    return "named on both hosts, with its traceback"


def asked_to_stop(hosts: Hosts) -> str:
    walk = Walk(hosts, ["--nnodes", "2"]).start("A", "B")
    walk.walking(2)
    walk.run.launchers["B"].send_signal(signal.SIGTERM)
    assert (walk.ends("B", 10), walk.ends("A", 10)) == (143, 0), [walk.run.said(side) for side in ("A", "B")]
    walk.none_alive(1)
    return "both hosts ended by themselves"


TRAINING = """
run = {{ name = "toy", steps = 40, out = "{out}" }}
batch = {{ global = 8, micro = 4 }}
model = {{ factory = "toy:Model" }}
data = {{ source = "toy:Data" }}
checkpoint = {{ every = 1, keep = 2 }}
"""


class Training(Run):
    """A run of toy.py by `dsx run`, with a checkpoint after every step."""

    @classmethod
    def on(cls, hosts: Hosts, *options: str) -> Training:
        folder = Path(tempfile.mkdtemp(dir=hosts.folder))
        (folder / "run.toml").write_text(TRAINING.format(out=folder / "out"))
        run = cls(hosts, folder, ["--nnodes", "2", *options], ())
        for side in ("A", "B"):
            run.start(side)
        return run

    def reaches(self, step: int) -> None:
        latest = self.folder / "out" / "checkpoints" / f"step-{step:08d}"
        eventually(lambda: latest.exists(), START_S)

    def weights(self) -> dict[str, list[float]]:
        codes = {side: launcher.wait(timeout=START_S) for side, launcher in self.launchers.items()}
        assert not any(codes.values()), [self.said(side) for side in codes]
        # The order of tensors in the file is not the same every time.
        return {name: tensor.tolist() for name, tensor in load_file(self.folder / "out" / "model.safetensors").items()}


def training(hosts: Hosts) -> str:
    """Killed, or stopped and resumed, a run ends with the weights of one that was left alone."""
    alone = Training.on(hosts).weights()
    killed = Training.on(hosts, "--max-restarts", "3")
    killed.reaches(10)
    (worker,) = Path(f"/proc/{killed.launchers['B'].pid}/task/{killed.launchers['B'].pid}/children").read_text().split()
    os.kill(int(worker), signal.SIGKILL)
    assert killed.weights() == alone, "other weights after a kill"
    stopped = Training.on(hosts)
    stopped.reaches(10)
    stopped.launchers["B"].send_signal(signal.SIGTERM)
    codes = [stopped.launchers[side].wait(timeout=START_S) for side in ("A", "B")]
    assert codes == [143, 143], [stopped.said(side) for side in ("A", "B")]
    stopped.options = [*stopped.options, "--resume"]
    for side in ("A", "B"):
        stopped.start(side)
    assert stopped.weights() == alone, "other weights after a stop"
    return "the same weights after a kill, and after a stop and --resume"


CASES: tuple[Callable[[Hosts], str], ...] = (
    killed_worker,
    lost_host,
    silent_host,
    joining_host,
    cut_link,
    killed_launcher,
    failing_rank,
    asked_to_stop,
    training,
)


def main(names: Sequence[str]) -> int:
    reason = missing()
    if reason is not None:
        print(f"skipped: {reason}")
        return 0
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}: the limits are meant for cores that are free")
    failed = 0
    for case in CASES:
        if names and case.__name__ not in names:
            continue
        with tempfile.TemporaryDirectory(prefix="dsx_multihost_") as folder, two_hosts(Path(folder)) as hosts:
            try:
                print(f"{case.__name__:<16}{case(hosts)}", flush=True)
            except Exception as error:
                failed += 1
                print(f"{case.__name__:<16}FAILED: {type(error).__name__}: {error}", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
