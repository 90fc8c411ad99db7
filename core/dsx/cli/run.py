"""`dsx run`."""

from __future__ import annotations

import click

from dsx.cli import options


@click.command()
@options.manifest
@options.overrides
@click.option("--nproc", type=click.IntRange(1), help="Ranks on this machine. Default: one for each GPU, else one.")
@click.option("--overwrite", is_flag=True, help="Replace the weights of an earlier run in the same folder.")
def command(manifest: str, overrides: tuple[str, ...], nproc: int | None, overwrite: bool) -> None:
    """Train as MANIFEST says.

    The manifest names a model, data and the plugins of the run. The final weights are written to run.out, by default
    runs/NAME, as model.safetensors.
    """
    from dsx.manifest import Manifest
    from dsx.registry import Registry
    from dsx.resolve import resolve
    from dsx.run.job import check
    from dsx.run.show import run_and_show

    count = nproc or _devices()
    settings = Manifest.load(manifest, set=overrides)
    check(settings, overwrite)
    settings.resolve_batch(count)
    resolve(settings, Registry.scan())  # what is wrong is said once, here, and not by every rank
    if count == 1:
        run_and_show(manifest, overrides, overwrite)
        return
    from dsx.launch.launch import launch

    arguments = {"manifest": manifest, "overrides": list(overrides), "overwrite": overwrite}
    click.get_current_context().exit(launch("dsx.run.show:run_and_show", arguments, count))


def _devices() -> int:
    import torch

    return max(1, torch.cuda.device_count())
