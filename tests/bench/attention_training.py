"""What a pattern of attention does to training: the loss on real text, the time of a step, what can be found again.

    python tests/bench/attention_training.py speed [--precision fp32,bf16] [--rounds 5]
    python tests/bench/attention_training.py text WAY... [--precision bf16] [--steps 250]
    python tests/bench/attention_training.py retrieval [WAY...] [--steps 150]

One thread, times in CPU time. `dense` is the model's own attention, torch's scaled_dot_product_attention;
`window and global` is `mixed` of a sliding window of 512 tokens and a first block of 128 that all see.

speed      a step of a GPT of 2 layers at 8,192 tokens of bytes, ways taking turns; the least of the rounds
text       the same GPT on Python's own sources, 8,192 tokens a step, the same ones for every way; then the loss on
           windows that were held out
retrieval  a GPT is told four facts in its first 128 tokens, reads 4,096 tokens of noise, and is asked for them: one of
           eight values each, so that guessing is right in 12.5 %. What share it answers rightly, of new sequences
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import dsx
from dsx_text import files, gpt

WINDOW, BLOCK = 512, 128
GLOBAL = {"use": ["sliding_window", "global_blocks"], "options": {"sliding_window": {"window": WINDOW}}}
WAYS: Mapping[str, dict[str, Any]] = {
    "dense": {},
    "window and global": {"use": ["mixed"], "mixed": {"block": BLOCK, "groups": [GLOBAL]}},
    "global local": {"use": ["global_local"], "global_local": {"window": WINDOW, "block": BLOCK, "ends": [BLOCK]}},
    "streaming": {"use": ["streaming"], "streaming": {"sinks": BLOCK, "recent": WINDOW, "block": BLOCK}},
    "bigbird": {"use": ["bigbird"], "bigbird": {"block": BLOCK, "random": 1}},
    "sliding window": {"use": ["sliding_window"], "sliding_window": {"window": WINDOW, "block": BLOCK}},
    "local blocks": {"use": ["local_blocks"], "local_blocks": {"before": 3, "block": BLOCK}},
}
BLIND = ("sliding window", "local blocks")
"""Ways that reach no further than some hundred tokens in each layer."""

TEXT: Mapping[str, Any] = {"layers": 2, "width": 128, "heads": 2, "context": 8192}
FACTS, VALUES, NOISE, ASKED = 4, 8, 4096, 128
READER: Mapping[str, Any] = {
    "layers": 1,
    "width": 64,
    "heads": 1,
    "context": BLOCK + NOISE + ASKED,
    "rope_base": 1e8,  # else few dimensions of a head are still about meaning at this distance
}


def engine_of(way: str, precision: str, steps: int, **model: Any) -> Any:
    """A GPT under a way of attention, always from the same weights."""
    torch.manual_seed(0)
    manifest: dict[str, Any] = {
        "precision": {"use": [precision]} if precision != "fp32" else {},
        "attention": WAYS[way],
        "optimize": {
            "use": ["adamw", "warmup_cosine"],
            "clip_norm": 1.0,
            "adamw": {"lr": 3e-3},
            "warmup_cosine": {"warmup": steps // 10, "total": steps},
        },
    }
    return dsx.prepare(gpt(**model), manifest)


def train_step(engine: Any, words: Mapping[str, Tensor]) -> float:
    engine.backward(engine(**words))
    return float(engine.step().loss)


def text(choices: argparse.Namespace) -> int:
    data = files(context=TEXT["context"])
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()
    assert data.held_out is not None
    held_out = [batched(data.held_out[number]) for number in range(min(choices.windows, len(data.held_out)))]
    print("| attention | held-out loss, nats a byte | loss of the last tenth of steps | ms a step |\n|---|---|---|---|")
    for way in choices.ways:
        engine = engine_of(way, choices.precision, choices.steps, **TEXT)
        losses = []
        start = time.process_time()
        for step in range(choices.steps):
            losses.append(train_step(engine, batched(data[order[step % len(order)]])))
            if step % 25 == 24:
                print(f"{way}: step {step + 1}, {sum(losses[-25:]) / 25:.4f}", file=sys.stderr, flush=True)
        took = (time.process_time() - start) / choices.steps
        with torch.no_grad():
            found = [float(engine(**words)["loss"]) for words in held_out]
        engine.close()
        last = losses[-max(1, choices.steps // 10) :]
        row = (way, f"{sum(found) / len(found):.4f}", f"{sum(last) / len(last):.4f}", f"{took * 1e3:.0f}")
        print(f"| {' | '.join(row)} |", flush=True)
    return 0


def batched(words: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor[None] for name, tensor in words.items()}


def speed(choices: argparse.Namespace) -> int:
    words = batched(files(context=TEXT["context"])[0])
    print("| precision | attention | ms a step | of dense |\n|---|---|---|---|")
    for precision in choices.precision.split(","):
        engines = {way: engine_of(way, precision, 100, **TEXT) for way in ("dense", "window and global")}
        least = dict.fromkeys(engines, math.inf)
        for number in range(choices.rounds + 1):
            for way, engine in engines.items():
                start = time.process_time()
                train_step(engine, words)
                if number:
                    least[way] = min(least[way], time.process_time() - start)
        for way, seconds in least.items():
            print(f"| {precision} | {way} | {seconds * 1e3:.0f} | {seconds / least['dense']:.2f} |", flush=True)
            engines[way].close()
    return 0


def questions(samples: int, seed: int) -> dict[str, Tensor]:
    """Facts (each token one of them with its value), noise, and questions, whose labels are the facts' tokens."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(most: int, count: int) -> Tensor:
        return torch.randint(0, most, (samples, count), generator=generator)

    values = drawn(VALUES, FACTS)
    told = torch.stack([torch.randperm(BLOCK, generator=generator) for _ in range(samples)]) % FACTS
    asked = drawn(FACTS, ASKED)
    noise, question = FACTS * VALUES, FACTS * VALUES + VALUES
    ids = torch.cat((told * VALUES + values.gather(1, told), noise + drawn(VALUES, NOISE), question + asked), 1)
    labels = torch.full_like(ids, -100)
    labels[:, -ASKED:] = asked * VALUES + values.gather(1, asked)
    return {"input_ids": ids, "labels": labels}


def retrieval(choices: argparse.Namespace) -> int:
    vocab = FACTS * VALUES + VALUES + FACTS
    print("| attention | answers right | ms a step |\n|---|---|---|")
    wrong = 0
    for way in choices.ways or WAYS:
        engine = engine_of(way, "fp32", choices.steps, vocab=vocab, **READER)
        start = time.process_time()
        for step in range(choices.steps):
            loss = train_step(engine, questions(choices.samples, step))
            if step % 25 == 24:
                print(f"{way}: step {step + 1}, {loss:.4f}", file=sys.stderr, flush=True)
        took = (time.process_time() - start) / choices.steps
        right = sum(answers(engine, questions(4, 1_000_000 + number)) for number in range(4)) / 4
        engine.close()
        fails = right > 2 / VALUES if way in BLIND else right < 0.99
        wrong += fails
        print(f"| {way} | {right:.1%} | {took * 1e3:.0f} |{'  WRONG' * fails}", flush=True)
    return 1 if wrong else 0


@torch.no_grad()
def answers(engine: Any, words: Mapping[str, Tensor]) -> float:
    """The share of questions whose likeliest answer is right."""
    guessed = engine(words["input_ids"])["logits"][:, -ASKED:].argmax(-1)
    return float((guessed == words["labels"][:, -ASKED:]).float().mean())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for command in (speed, text, retrieval):
        own = commands.add_parser(command.__name__)
        own.set_defaults(run=command)
        if command is not speed:
            own.add_argument("ways", nargs="+" if command is text else "*", metavar="WAY", help=", ".join(WAYS))
            own.add_argument("--steps", type=int, default=250 if command is text else 150)
        if command is not retrieval:
            own.add_argument("--precision", default="fp32,bf16" if command is speed else "bf16")
    commands.choices["speed"].add_argument("--rounds", type=int, default=5)
    commands.choices["text"].add_argument("--windows", type=int, default=16, help="held out")
    commands.choices["retrieval"].add_argument("--samples", type=int, default=4)
    choices = parser.parse_args()
    torch.set_num_threads(1)
    run: Any = choices.run
    return int(run(choices))


if __name__ == "__main__":
    sys.exit(main())
