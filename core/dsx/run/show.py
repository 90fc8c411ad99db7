"""Runs the job in a rank and tells, on rank 0, how it ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

import click

from dsx.run.job import Summary, run


def run_and_show(
    manifest: str,
    overrides: Sequence[str] = (),
    overwrite: bool = False,
    resume: str | None = None,
    timeout_s: float = 600,
    elastic: bool = False,
) -> int:
    """What every rank of `dsx run` calls; the exit code: 0, or 128 + n after a stop by signal n."""
    summary = run(manifest, overrides, overwrite, resume, timeout_s, elastic)
    if os.environ.get("RANK", "0") == "0":
        click.echo(text(summary, manifest))
    return 128 + summary.stopped if summary.stopped else 0


def text(summary: Summary, manifest: str) -> str:
    """The end of a run, for people."""
    lines = [f"note           {note}" for note in summary.notes]
    if summary.after is not None:
        untrained = "" if summary.before is None else f"; untrained {summary.before:.4f}"
        lines.append(f"held-out loss  {summary.after.loss:.4f} after step {summary.after.step}{untrained}")
    if summary.skips:
        lines.append(f"skipped steps  {summary.skips}, their gradients were not finite")
    if summary.stopped:
        name = signal.Signals(summary.stopped).name
        lines.append(f"stopped        by {name} after {summary.updates} updates; a checkpoint was saved")
        return "\n".join([*lines, "", f"Go on with:\n  dsx run {manifest} --resume"])
    lines.append(f"weights        {summary.weights}")
    if summary.sample:
        lines += [
            "",
            "The model continues a held-out text:",
            "",
            *(f"    {line}" for line in summary.sample.splitlines()),
        ]
    lines += ["", "What to try next:", *(f"  {command}\n      {what}" for command, what in _next(manifest))]
    return "\n".join(lines)


def _next(manifest: str) -> list[tuple[str, str]]:
    return [
        (f"dsx explain {manifest}", "who does what in this run, and why"),
        (f"dsx run {manifest} --nproc 2 --overwrite", "the same on two ranks"),
        (f"dsx run {manifest} --overwrite --set run.seed=1", "any key can be set from here"),
        ("dsx plugins", "what else is installed"),
    ]
