"""The update that is likely to follow a window's last backward, which a stepper may begin before the vote."""

from __future__ import annotations

from collections.abc import Sequence

from dsx.contracts import Job
from dsx.program import Program


def expect(program: Program, number: int, weight: float, counts: Sequence[int], used: Sequence[bool]) -> None:
    """Tell the stepper of update `number`.

    weight  mean of this rank's micro-batches; the others' are taken to be the same
    counts  updates that each parameter has had
    used    by parameter, in the last update
    """
    if weight and program.stepper.expects:
        hypers = program.schedule.at(number, program.hypers)
        steps = tuple(count + more for count, more in zip(counts, used, strict=True))
        program.stepper.expect(Job(hypers, 1.0 / program.scaler.value / weight, used, steps, number))
