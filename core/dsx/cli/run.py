"""`dsx run`."""

from __future__ import annotations

import os
import re
from typing import Any

import click
from attrs import frozen

from dsx.cli import options
from dsx.launch.config import exchange_s

RANK_TARGET = "dsx.run.show:run_and_show"
SCRIPT_TARGET = "dsx.launch.script:run_script"


def _hosts(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """A number of hosts, or a range of them."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d+)(?::(\d+))?", value)
    if match is None:
        raise click.BadParameter(f"'{value}' is neither a number of hosts, such as 2, nor a range, such as 1:2.")
    return int(match[1]), int(match[2] or match[1])


class _Command(click.Command):
    """Leaves everything after the script's name to the script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = self._script(ctx, args)
        return super().parse_args(ctx, args if at is None else [*args[:at], "--", *args[at:]])

    def _script(self, ctx: click.Context, args: list[str]) -> int | None:
        """Where the second argument that belongs to no option stands."""
        known = {name: param for param in self.get_params(ctx) for name in param.opts}
        words, skip = 0, False
        for at, word in enumerate(args):
            if word == "--":
                return None
            if skip:
                skip = False
            elif word.startswith("-"):
                option = known.get(word)
                skip = isinstance(option, click.Option) and self._takes(option, args[at + 1 : at + 2])
            elif words:
                return at
            else:
                words += 1
        return None

    @staticmethod
    def _takes(option: click.Option, following: list[str]) -> bool:
        if option.is_flag or option.count:
            return False
        optional = option.flag_value is not None
        return not (optional and following and following[0].startswith("-"))


@frozen(kw_only=True)
class _Request:
    """What the command line asks for."""

    manifest: str
    overrides: tuple[str, ...]
    script: tuple[str, ...]
    overwrite: bool
    resume: str | None
    timeout_s: float

    def call(self, elastic: bool) -> tuple[str, dict[str, Any]]:
        """What every rank calls, and with which arguments; `elastic` ranks may start again."""
        shared = {"manifest": self.manifest, "overrides": list(self.overrides)}
        if self.script:
            return SCRIPT_TARGET, {**shared, "script": self.script[0], "arguments": list(self.script[1:])}
        choices = {"overwrite": self.overwrite, "resume": self.resume, "timeout_s": exchange_s(self.timeout_s)}
        return RANK_TARGET, {**shared, **choices, "elastic": elastic}


@click.command(cls=_Command)
@options.manifest
@click.argument("script", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT [ARGS]...]")
@options.overrides
@click.option("--nproc", type=click.IntRange(1), help="Ranks on this host. Default: one for each GPU, else one.")
@click.option(
    "--nnodes",
    "hosts",
    metavar="N|MIN:MAX",
    callback=_hosts,
    help="Hosts of the run. With a range, hosts may join it, and with --max-restarts be lost. Default: 1.",
)
@click.option("--rdzv-endpoint", "endpoint", metavar="HOST:PORT", help="Where the hosts meet: a free port on one.")
@click.option("--local-addr", metavar="ADDRESS", help="This host as the others reach it. Default: found out.")
@click.option("--max-restarts", type=click.IntRange(0), help="Go on from the last checkpoint after a failure, N times.")
@click.option(
    "--timeout",
    type=click.FloatRange(1),
    default=600,
    help="Seconds after which ranks that do not reach each other have ended.",
)
@click.option(
    "--resume",
    is_flag=False,
    flag_value="latest",
    metavar="[latest|latest-or-start|PATH]",
    help="Go on from the last checkpoint of the run's folder, or from that at PATH; latest-or-start: if there is one.",
)
@click.option("--overwrite", is_flag=True, help="Replace what an earlier run left in the same folder.")
def command(
    manifest: str,
    script: tuple[str, ...],
    overrides: tuple[str, ...],
    overwrite: bool,
    resume: str | None,
    timeout: float,
    **placement: Any,
) -> None:
    """Train as MANIFEST says, or run SCRIPT, whose dsx.prepare(model) takes MANIFEST.

    Without a SCRIPT the manifest names a model, data and the plugins of the run; the final weights are written to
    run.out, by default runs/NAME, as model.safetensors.

    Ranks are started on this host, and on each host where the same command is given with --nnodes and
    --rdzv-endpoint. Inside srun, mpirun or torchrun this process is the rank that it was started as, unless one of
    --nproc, --nnodes, --rdzv-endpoint and --max-restarts asks for ranks of its own.
    """
    if script and (overwrite or resume):
        raise click.UsageError("--resume and --overwrite are for runs without a script: it decides by itself.")
    request = _Request(
        manifest=manifest, overrides=overrides, script=script, overwrite=overwrite, resume=resume, timeout_s=timeout
    )
    click.get_current_context().exit(_run(request, placement))


def _run(request: _Request, placement: dict[str, Any]) -> int:
    from dsx.launch.config import LaunchConfig
    from dsx.launch.distributed import TIMEOUT
    from dsx.launch.outer import outer_ranks
    from dsx.launch.worker import end

    own = any(placement[name] is not None for name in ("nproc", "hosts", "endpoint", "max_restarts"))
    outer = None if own else outer_ranks(os.environ)
    if outer is not None:
        os.environ |= {**outer, TIMEOUT: f"{exchange_s(request.timeout_s):g}"}
        code = _as_rank(*request.call(elastic=False))
        if code == 0 and os.environ.get("WORLD_SIZE", "1") != "1":
            end()  # a group that is still there when Python ends may abort the process
        return code
    least, most = placement["hosts"] or (1, 1)
    config = LaunchConfig(
        nproc=placement["nproc"] or _devices(),
        min_hosts=least,
        max_hosts=most,
        endpoint=placement["endpoint"],
        local_addr=placement["local_addr"],
        max_restarts=placement["max_restarts"] or 0,
        timeout_s=request.timeout_s,
    )
    _check(request, config)
    target, arguments = request.call(config.elastic)
    if config.nproc == 1 and not config.several_hosts and not config.elastic:
        return _as_rank(target, arguments)
    from dsx.launch.launch import launch_with

    return launch_with(config, target, arguments)


def _check(request: _Request, config: Any) -> None:
    """Say what is wrong once, here, and not by every rank."""
    from dsx.manifest import Manifest
    from dsx.registry import Registry
    from dsx.resolve import resolve
    from dsx.run.job import check, check_folder

    settings = Manifest.load(request.manifest, set=request.overrides)
    if not request.script:
        check(settings)
        if not (config.elastic and config.several_hosts):  # else others may have begun
            check_folder(settings, request.overwrite, request.resume)
        for hosts in range(config.min_hosts, config.max_hosts + 1):
            settings.resolve_batch(hosts * config.nproc)
    resolve(settings, Registry.scan())


def _as_rank(target: str, arguments: dict[str, Any]) -> int:
    """Be a rank, in this process."""
    if target == RANK_TARGET:
        from dsx.run.show import run_and_show

        return run_and_show(**arguments)
    from dsx.errors import DsxError
    from dsx.launch.script import run_script
    from dsx.launch.worker import users_traceback

    try:
        run_script(**arguments)
    except DsxError:
        raise
    except Exception as error:
        click.echo(users_traceback(error), err=True, nl=False)
        return 1
    return 0


def _devices() -> int:
    import torch

    return max(1, torch.cuda.device_count())
