"""`dsx report`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "--output", default="report.html", show_default=True, type=click.Path(path_type=Path), help="Page.")
@click.option("--png", is_flag=True, help="Also a picture beside it; needs matplotlib.")
def command(runs: tuple[Path, ...], output: Path, png: bool) -> None:
    """Draw the curves of RUNS, folders of runs that had the observer `jsonl`, on one page.

    Loss, gradient norm, learning rate, tokens per second, memory and skipped updates, all runs over each other. The
    page is a single HTML file that loads nothing from elsewhere.
    """
    from dsx.errors import DsxError
    from dsx_observe.report.page import page
    from dsx_observe.report.picture import picture, require
    from dsx_observe.report.read import read_runs

    if png:
        require()
    found = read_runs(runs)
    written = [output, output.with_suffix(".png")] if png else [output]
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(page(found), "utf-8")
        if png:
            picture(found, written[1])
    except OSError as error:
        raise DsxError(f"{output} cannot be written", found=error.strerror, remedy="choose another with -o") from error
    click.echo(f"wrote {' and '.join(map(str, written))}: {', '.join(run.label for run in found)}")
