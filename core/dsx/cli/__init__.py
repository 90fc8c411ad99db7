"""The command line. Commands are imported when they are called; those of plugins come from the group `dsx.commands`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

import click

_COMMANDS = {
    "run": ("dsx.cli.run", "Train as a manifest says: alone, or on several ranks of this machine."),
    "explain": ("dsx.cli.explain", "Show who fills each role of a run and why, and where every value comes from."),
    "plan": ("dsx.cli.plan", "Say what each rank will hold, send and compute, without running anything."),
    "plugins": ("dsx.cli.plugins", "List the installed plugins without importing them; `check NAME` examines one."),
    "inspect": ("dsx.cli.inspect", "Show what is in a checkpoint, and whether it is whole."),
    "export": ("dsx.cli.export", "Write a checkpoint's weights as safetensors, for transformers and others."),
    "init": ("dsx.cli.init", "Write a commented run.toml here that runs as it is."),
    "new": ("dsx.cli.new", "Make a plugin package of your own, with tests that pass."),
    "doctor": ("dsx.cli.doctor", "Say what of this machine dsx can use, and what each absence costs."),
}


class Commands(click.Group):
    """Core's own commands, then those that installed packages register."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_COMMANDS, *(name for name in _registry().names() if name not in _COMMANDS)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _COMMANDS:
            command: click.Command = importlib.import_module(_COMMANDS[cmd_name][0]).command
            return command
        if cmd_name not in _registry().names():
            return None
        return _plugin_command(cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Help without importing a command."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])
        others = [(entry.name, f"from {entry.distribution}") for entry in _registry().registrations]
        if others:
            with formatter.section("Commands of installed packages"):
                formatter.write_dl(others)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        from dsx.errors import near

        if args and not args[0].startswith("-") and args[0] not in self.list_commands(ctx):
            hint = near(args[0], self.list_commands(ctx))
            raise click.UsageError(f"no such command '{args[0]}'." + (f" {hint.capitalize()}" if hint else ""), ctx)
        return super().resolve_command(ctx, args)


def _registry() -> Any:
    from dsx.entries import COMMANDS, Entries

    return Entries.scan(COMMANDS)


def _plugin_command(name: str) -> click.Command:
    from dsx.entries import import_target, invalid

    entry = _registry().find(name)
    command = import_target(entry)
    if not isinstance(command, click.Command):
        raise invalid(entry, "is not a click command")
    return command


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dsx-engine", prog_name="dsx")
def group() -> None:
    """dsx: train large PyTorch models, composed of plugins by a manifest.

    `dsx init` writes a first manifest, `dsx run run.toml` trains it.
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """The script `dsx`: exit code 0, 1 failed, 2 misuse, or that of the rank that failed first."""
    sys.exit(call(arguments))


def call(arguments: Sequence[str] | None = None) -> int:
    """Run a command; errors that users can mend are shown without a traceback."""
    from dsx.errors import DsxError

    try:
        result = group.main(arguments, prog_name="dsx", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("stopped", err=True)
        return 130
    except DsxError as error:
        click.echo(f"{click.style('error', fg='red')}: {error}", err=True)
        return error.exit_code
