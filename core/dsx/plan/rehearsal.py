"""A run on paper: its own parts are built on the meta device, for any world size, and make updates there.

Nothing is estimated by a formula of ours: what a part would allocate, send or compute is what it does allocate, send
and compute, on tensors without memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from attrs import evolve, frozen

from dsx.build import build
from dsx.counting import Counting
from dsx.defaults.collectives import working_bytes
from dsx.engine import Engine
from dsx.plan.attention import FusedAttention
from dsx.plan.ledger import Ledger
from dsx.plan.reads import Lists
from dsx.plan.subject import Forward, Subject, use_all
from dsx.plan.twin import Twin
from dsx.plan.work import Work
from dsx.resolve import Resolved
from dsx.start import make_plan

UPDATES = 2
"""The last one is counted: what parts learn or make at the first is there by then."""

BUFFER, ACTIVATIONS = "buffer", "activations"

Bytes = Mapping[tuple[str, str], int]
"""By (where they are, such as "device" or "disk"; what they are)."""


@frozen
class Rehearsal:
    """What one rank will hold and do.

    world         ranks
    accumulation  micro-batches of an update
    states        parameters, gradients, masters and the rule's states, between updates
    buffers       what parts keep besides, between updates
    peak          at the worst instant of an update; `activations` is what the model's own operations hold then
    work          of an update
    guessed       numbers that the run read of tensors without values, and that were taken to be 1
    """

    world: int
    accumulation: int
    states: Bytes
    buffers: Bytes
    peak: Bytes
    work: Work
    guessed: int

    def on(self, place: str) -> int:
        """Bytes at the worst instant at one place."""
        return sum(size for (where, _), size in self.peak.items() if where == place)


def rehearse(
    resolved: Resolved, subject: Subject, *, rank: int = 0, world: int = 1, local: int | None = None
) -> Rehearsal:
    """Build a run for one rank of `world` and make updates on paper.

    local  ranks of a host, which read one another's memory; None: all; 0: the device is not a CPU, and its collectives
           keep no memory of ours

    Raises the `DsxError`s of `dsx.prepare`.
    """
    plan = make_plan(resolved, rank, world, torch.device("meta"))
    here = min(world, world if local is None else local)
    working = partial(working_bytes, world=world, local=here) if here else lambda size: (0, 0)
    transport, ledger = Counting(Twin(rank, world, working)), Ledger()
    model = subject.model()
    forward = subject.forward or use_all(model)
    with _on_paper(ledger):
        program = build(_uncompiled(resolved), plan, model, transport)
        ledger.follow(model.parameters())
        clip = resolved.manifest.optimize.clip_norm
        engine = Engine(model, program, accumulation=min(plan.accumulation, 2), clip_norm=clip)
        for _ in range(UPDATES):
            ledger.begin(lambda: _held(engine))
            transport.reset()
            work = _update(engine, forward, ledger, transport, plan.accumulation)
        held = _held(engine)
        peak = {**ledger.at_peak, ("device", ACTIVATIONS): max(0, ledger.peak - _in_memory(ledger.at_peak))}
        engine.close()
    return Rehearsal(
        world,
        plan.accumulation,
        {key: size for key, size in held.items() if key[1] != BUFFER},
        {key: size for key, size in held.items() if key[1] == BUFFER},
        peak,
        work,
        ledger.read,
    )


def _uncompiled(resolved: Resolved) -> Resolved:
    """What a compiler would fuse is not known on paper."""
    settings = resolved.manifest
    return evolve(resolved, manifest=evolve(settings, run=evolve(settings.run, compile=False)))


@contextmanager
def _on_paper(ledger: Ledger) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(FusedAttention())
        stack.enter_context(Lists())
        stack.enter_context(ledger)
        yield


def _update(engine: Engine, forward: Forward, ledger: Ledger, transport: Counting, accumulation: int) -> Work:
    """Make one update. Micro-batches between the first and the last are alike, so that one stands for all of them."""
    total: Counter[tuple[str, str]] = Counter()
    for number in range(engine.accumulation):
        before = _counts(ledger, transport)
        with ledger.during("moved"):
            engine.backward(forward(engine))
        with ledger.during("updated"):
            engine.step()
        last = number == engine.accumulation - 1
        for key, count in _counts(ledger, transport).items():
            total[key] += (count - before[key]) * (1 if last else accumulation - 1)

    def of(kind: str) -> dict[str, int]:
        return {name: count for (found, name), count in total.items() if found == kind}

    moved = of("moved")
    return Work(of("flops"), moved["moved"], moved["updated"], sum(of("calls").values()), of("sent"), of("messages"))


def _counts(ledger: Ledger, transport: Counting) -> Counter[tuple[str, str]]:
    kinds = {
        "flops": ledger.flops,
        "moved": Counter({"moved": 0, "updated": 0}) | ledger.moved,
        "calls": ledger.calls,
        "sent": transport.bytes,
        "messages": transport.calls,
    }
    return Counter({(kind, name): count for kind, counts in kinds.items() for name, count in counts.items()})


def _held(engine: Engine) -> dict[tuple[str, str], int]:
    """What parts answer for now. Layouts hold theirs on the device."""
    program = engine.program
    held = Counter(program.store.places())
    for holder in (program.layout, program.stepper):
        held.update({("device", name): size for name, size in holder.bytes().items()})
    return dict(held)


def _in_memory(held: Bytes) -> int:
    """What of it has tensors: not what is in files."""
    return sum(size for (place, _), size in held.items() if place in ("device", "host"))
