"""One rank's part of `dsx run`: everything from the manifest to the saved weights."""

from __future__ import annotations

import importlib
import inspect
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import nn

from dsx.contracts import Evaluation, RunInfo
from dsx.engine import Engine
from dsx.errors import DsxError
from dsx.launch.distributed import join, leave
from dsx.manifest import Manifest
from dsx.manifest.batch import Batch
from dsx.manifest.schema import Target
from dsx.run.data import Batches, tokens_of
from dsx.run.evaluate import evaluate
from dsx.run.weights import save_weights
from dsx.start import prepare

WEIGHTS = "model.safetensors"


@frozen
class Summary:
    """How a run ended.

    before   evaluation of the untrained model, if the data has a held-out part
    after    of the trained one
    weights  the file written
    skips    updates skipped because a gradient was not finite
    sample   a text by the trained model, if the data can make one
    """

    before: Evaluation | None
    after: Evaluation | None
    weights: Path
    skips: int
    sample: str


def run(manifest: str, overrides: Sequence[str] = (), overwrite: bool = False) -> Summary:
    """Train as the manifest at this path says; entered by every rank.

    Raises `DsxError` where the manifest lacks what a run needs, or its folder holds an earlier run's weights.
    """
    settings = Manifest.load(manifest, set=overrides)
    steps = check(settings, overwrite)
    cuda = torch.cuda.is_available()
    ranks = join(torch.device("cuda" if cuda else "cpu"))
    device = torch.device("cuda", ranks.local_rank) if cuda else torch.device("cpu")
    try:
        batch = settings.resolve_batch(ranks.world)
        _seed(settings.run.seed)
        model, source = make_model(settings.model, device), make(settings.data, "data.source")
        engine = prepare(model, settings, overlap_publish=True)
        _seed(settings.run.seed * 1_000_003 + 1 + ranks.rank)
        try:
            return _train(engine, settings, source, batch, steps, device)
        finally:
            engine.close()
    finally:
        leave(ranks)


def check(settings: Manifest, overwrite: bool) -> int:
    """The number of steps, after refusing what `dsx run` cannot run."""
    missing = [
        f"{key} ({words})"
        for key, words, value in (
            ("run.steps", "how many updates", settings.run.steps),
            ("model.factory", "which model", settings.model),
            ("data.source", "which data", settings.data),
            ("batch.micro or batch.global", "how many samples", settings.batch.micro or settings.batch.global_),
        )
        if value is None
    ]
    if missing:
        raise DsxError(
            f"`dsx run` needs {', '.join(missing)}", where=str(settings.path), remedy="`dsx init` writes a start"
        )
    weights = settings.run.folder / WEIGHTS
    if weights.exists() and not overwrite:
        raise DsxError(
            f"{weights} holds the weights of an earlier run",
            where="run.out",
            remedy="choose another folder with --set run.out=..., or give --overwrite",
        )
    return settings.run.steps or 0


def _train(engine: Engine, settings: Manifest, source: Any, batch: Batch, steps: int, device: torch.device) -> Summary:
    transport, observers = engine.program.transport, engine.program.observers
    micro = batch.micro or 1
    batches = Batches(
        source,
        micro=micro,
        accumulation=batch.accumulation,
        rank=transport.rank,
        world=transport.world,
        seed=settings.run.seed,
        device=device,
    )
    folder, held_out = settings.run.folder, getattr(source, "held_out", None)
    folder.mkdir(parents=True, exist_ok=True)
    info = _info(engine, settings, source, batches, steps)
    for observer in observers:
        observer.start(info)

    def evaluated() -> Evaluation | None:
        if held_out is None or len(held_out) == 0:
            return None
        found = evaluate(engine, held_out, micro=micro, device=device, samples=settings.evaluate.samples)
        for observer in observers:
            observer.evaluated(found)
        return found

    before = after = evaluated()
    every = settings.evaluate.every
    for number in range(steps):
        engine.train_step(batches.update(number))
        if number + 1 == steps or (every and (number + 1) % every == 0):
            after = evaluated()
    save_weights(engine, folder / WEIGHTS)
    return Summary(before, after, folder / WEIGHTS, engine.skips, _sample(engine, source))


def _info(engine: Engine, settings: Manifest, source: Any, batches: Batches, steps: int) -> RunInfo:
    first = source[0] if hasattr(source, "__getitem__") else next(iter(source), 0)
    count = sum(parameter.numel() for parameter in engine.model.parameters() if parameter.requires_grad)
    world = engine.program.transport.world
    return RunInfo(settings.run.name, steps, count, world, batches.samples, tokens_of(first))


def _sample(engine: Engine, source: Any) -> str:
    """Entered by all ranks: under some layouts a forward needs every one of them."""
    show = getattr(source, "sample", None)
    if show is None:
        return ""
    engine.model.eval()
    with torch.no_grad():
        return str(show(engine.model))


def make_model(target: Target | None, device: torch.device) -> nn.Module:
    """The manifest's model, on `device`."""
    model = make(target, "model.factory")
    if not isinstance(model, nn.Module):
        raise DsxError(f"model.factory returned a {type(model).__name__}", expected="a torch.nn.Module")
    return model.to(device)


def make(target: Target | None, key: str) -> Any:
    """Call a "module:callable" with its arguments. The current folder is searched first, as a script's own is."""
    assert target is not None
    module, _, name = target.path.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module)
        for attribute in name.split("."):
            found = getattr(found, attribute)
    except (ImportError, AttributeError) as error:
        raise DsxError(f"{key} = '{target.path}' cannot be found", found=str(error)) from error
    try:
        inspect.signature(found).bind(**target.keywords())
    except TypeError as error:
        known = ", ".join(inspect.signature(found).parameters)
        section = key.split(".")[0]
        raise DsxError(f"{target.path}: {error}", where=f"[{section}]", expected=f"among {known}") from error
    except ValueError:
        pass  # a callable without a signature, such as some built in C
    return found(**target.keywords())


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed % (1 << 63))
