"""What `delayed_update` costs of the loss: trained from scratch, and in fine-tuning.

    python tests/bench/delayed.py [--files FOLDER] [--rates 3e-4,1e-4,3e-5] [--steps 1000] [--from-scratch 4e-3,1e-3]

The model of the quickstart. From scratch it is trained on Python's own sources. In fine-tuning it begins with what
quickstart.toml makes of it, and is trained on other text (`--files`, by default the headers of C++ in
/usr/include). Held-out loss at the end, plain and delayed after 40 updates, from the same weights on the same samples.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from dsx.run.job import run

QUICKSTART = Path(__file__).parents[2] / "docs" / "manifests" / "quickstart.toml"
HELD_OUT = 256
"""Samples of 256 bytes that the loss is of."""


def trained(out: Path, *overrides: str) -> float:
    """The held-out loss at the end of a run of quickstart.toml, in nats a byte."""
    common = [f'run.out="{out}"', "observe.use=[]", f"evaluate.samples={HELD_OUT}"]
    summary = run(str(QUICKSTART), [*common, *overrides], overwrite=True)
    assert summary.after is not None
    return summary.after.loss


def compare(folder: Path, name: str, rates: Sequence[str], steps: int, *overrides: str) -> None:
    """A row for each learning rate."""
    for rate in rates:
        settings = [*overrides, f"run.steps={steps}", f"evaluate.every={steps}", f"optimize.adamw.lr={rate}"]
        delay = 'optimize.use=["adamw", "warmup_cosine", "delayed_update"]'
        plain, delayed = trained(folder / "plain", *settings), trained(folder / "delayed", *settings, delay)
        print(f"| {name} | {rate} | {plain:.4f} | {delayed:.4f} | {delayed / plain - 1:+.2%} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", default="/usr/include/c++")
    parser.add_argument("--rates", default="3e-4,1e-4,3e-5", help="of fine-tuning")
    parser.add_argument("--from-scratch", default="4e-3,1e-3", help="rates")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=2)
    choices = parser.parse_args()
    torch.set_num_threads(choices.threads)
    print("| training | learning rate | plain | delayed | |\n| --- | --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trained(folder / "base")
        other = [f'data.files="{choices.files}"', f'run.weights="{folder / "base" / "model.safetensors"}"']
        compare(folder, "fine-tuning", choices.rates.split(","), choices.steps, *other)
        compare(folder, "from scratch", [rate for rate in choices.from_scratch.split(",") if rate], choices.steps)


if __name__ == "__main__":
    main()
