"""Runs the job in a rank and tells, on rank 0, how it ended."""

from __future__ import annotations

import os
from collections.abc import Sequence

import click

from dsx.run.job import Summary, run


def run_and_show(manifest: str, overrides: Sequence[str] = (), overwrite: bool = False) -> None:
    """What every rank of `dsx run` calls."""
    summary = run(manifest, overrides, overwrite)
    if os.environ.get("RANK", "0") == "0":
        click.echo(text(summary, manifest))


def text(summary: Summary, manifest: str) -> str:
    """The end of a run, for people."""
    lines: list[str] = []
    before, after = summary.before, summary.after
    if before is not None and after is not None:
        lines.append(f"held-out loss  {after.loss:.4f} after step {after.step}; untrained {before.loss:.4f}")
    if summary.skips:
        lines.append(f"skipped steps  {summary.skips}, their gradients were not finite")
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
