"""Writes the pages of docs/reference from the code they describe: `python docs/generate.py`.

tests/architecture/test_docs_generated.py fails where the pages that are committed differ from what this makes.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import attrs
import click

from dsx import contracts, errors
from dsx.cli import Commands, group
from dsx.entries import PLUGINS
from dsx.manifest import Section
from dsx.manifest.describe import describe
from dsx.manifest.hooks import keys_of
from dsx.manifest.schema import BatchKeys, Checkpoint, Evaluate, Optimize, Run
from dsx.plugin import Context, Descriptor, Fill, Need, Part, Plan
from dsx.resolve import NULL_OFFERS
from dsx.roles import BUILD_ORDER, SECTIONS, Role

ROOT = Path(__file__).parent.parent
HOME = ROOT / "docs" / "reference"
MARK = "<!-- made by docs/generate.py from the code: change it there -->\n\n"

_CONTRACTS: Mapping[str, tuple[type, ...]] = {
    "dtypes": (contracts.Dtypes,),
    "groups": (contracts.Groups,),
    "rule": (contracts.Rule, contracts.ViewRule),
    "transport": (contracts.Transport, contracts.Handle),
    "wrappers": (contracts.TransportWrapper,),
    "guard": (contracts.Guard,),
    "scaler": (contracts.Scaler,),
    "tiers": (contracts.Store, contracts.Tier),
    "layout": (contracts.Layout, contracts.Ballot),
    "activations": (contracts.Activations,),
    "attention": (contracts.Attention, contracts.Site, contracts.Attend),
    "stepper": (contracts.Stepper,),
    "schedule": (contracts.Schedule,),
    "observers": (contracts.Observer, contracts.RunInfo, contracts.Evaluation),
}
_DATA = (
    contracts.Segment,
    contracts.Flat,
    contracts.Unit,
    contracts.Shard,
    contracts.Piece,
    contracts.Run,
    contracts.Hyper,
    contracts.Job,
    contracts.State,
    contracts.Report,
)
_KINDS = {"one": "one plugin", "chain": "a chain, outermost first", "claims": "many, each with its own claims"}


def pages() -> dict[str, str]:
    """File name in docs/reference -> its text."""
    made = {
        "manifest.md": _manifest(),
        "roles.md": _roles(),
        "plugins.md": _plugins(),
        "errors.md": _errors(),
        "cli.md": _cli(),
        "kernels.md": _kernels(),
    }
    return {name: MARK + text.rstrip("\n") + "\n" for name, text in made.items()}


_MANIFEST = """# Manifest

A TOML file. All problems in it are reported at once, each with its line. Every key can be set from the command line:
`--set optimize.clip_norm=1.0`.
"""
_TARGETS = """## [model] and [data]

`dsx run` needs both; `dsx.prepare` accepts them and does not use them. Every further key is an argument of the
callable.

| key | type | meaning |
| --- | --- | --- |
| `model.factory` | a text of the form "module:callable" | returns a `torch.nn.Module` |
| `data.source` | a text of the form "module:callable" | returns samples: a length and `[i]`, or an iterable |
"""
_USE = f"""## Sections of plugins

{", ".join(f"`[{section}]`" for section in SECTIONS)}: `use` names the plugins in use, in order, and a table
`[section.plugin]` gives the options of one of them. What there is: [plugins](plugins.md).
"""


def _manifest() -> str:
    first = [_section("run", Run), _section("batch", BatchKeys)]
    last = [_section("optimize", Optimize), _section("evaluate", Evaluate), _section("checkpoint", Checkpoint)]
    return "\n".join([_MANIFEST, *first, _TARGETS, _USE, *last])


def _section(name: str, cls: type) -> str:
    skip = ("name", "tables") if issubclass(cls, Section) else ()
    return f"## [{name}]\n\n{_lead(cls)}\n\n{_options(cls, f'{name}.', skip)}"


def _options(cls: type, prefix: str = "", skip: Sequence[str] = ()) -> str:
    """The table of an attrs class: key, type in words, default, meaning."""
    kinds, meanings = get_type_hints(cls, include_extras=True), _items(cls)
    fields = attrs.fields_dict(cls)
    rows = []
    for key, name in keys_of(cls).items():
        if name not in skip:
            meaning = _escape(meanings.get(name, ""))
            rows.append((f"`{prefix}{key}`", describe(kinds[name]), _default(fields[name]), meaning))
    return _table(("key", "type", "default", "meaning"), rows)


def _default(field: attrs.Attribute[Any]) -> str:
    if field.default is attrs.NOTHING:
        return "required"
    value: Any = field.default
    value = getattr(value, "factory", lambda: value)()
    return "absent" if value is None else f"`{_toml(value)}`"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_toml, value))}]"
    return "{}" if isinstance(value, Mapping) else f"{value:g}" if isinstance(value, float) else str(value)


_ROLES = """# Roles and contracts

A plugin fills roles of its own section; a role that nobody fills has core's null part. Parts are built in this order.
Plugins import these classes from `dsx.contracts` and `dsx.plugin`.

"""


def _roles() -> str:
    rows = [
        (
            f"[`{role.name}`](#{role.name})",
            f"`[{role.section}]`",
            _KINDS[role.kind],
            role.null,
            _words(NULL_OFFERS.get(role.name, ())),
        )
        for role in BUILD_ORDER
    ]
    table = _table(("role", "section", "filled by", "null part", "null part offers"), rows)
    parts = [_ROLES + table, *(_role(role) for role in BUILD_ORDER)]
    parts.append("## What parts work on\n\n" + _prose(contracts.data.__doc__ or "") + "\n")
    parts += [_class(cls) for cls in _DATA]
    parts.append("## What plugins are made of\n")
    parts += [_class(cls) for cls in (Descriptor, Fill, Need, Part, Plan, Context)]
    return "\n".join(parts)


def _role(role: Role) -> str:
    return f"## {role.name}\n\n" + "\n".join(_class(cls) for cls in _CONTRACTS[role.name])


def _class(cls: type) -> str:
    text = f"### {cls.__name__}\n\n{_prose(inspect.getdoc(cls) or '')}\n"
    for name, member in vars(cls).items():
        function = member.fget if isinstance(member, property) else member
        own = inspect.isfunction(function) and function.__module__ == cls.__module__
        if own and function.__doc__ and (not name.startswith("_") or name == "__call__"):
            signature = "" if isinstance(member, property) else _signature(function)
            text += f"\n#### `{name}{signature}`\n\n{_prose(inspect.getdoc(function) or '')}\n"
    return text


class _Bare(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _signature(function: Any) -> str:
    """As written, without `self`; annotations are strings here, and shown without their quotes."""
    found = inspect.signature(function)
    parameters = [p.replace(annotation=_Bare(p.annotation)) for name, p in found.parameters.items() if name != "self"]
    return str(found.replace(parameters=parameters, return_annotation=_Bare(found.return_annotation)))


_PLUGINS = """# Plugins

What the distribution `dsx-engine` registers. `dsx plugins` lists what is installed, others' too.
"""


def _plugins() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    registered: dict[str, str] = project["entry-points"][PLUGINS]
    found = {name: importlib.import_module(target).descriptor for name, target in registered.items()}
    text = _PLUGINS
    for section in SECTIONS:
        chosen = [(name, found[name]) for name in registered if found[name].section == section]
        if chosen:
            text += f"\n## [{section}]\n\n" + "\n".join(_plugin(name, descriptor) for name, descriptor in chosen)
    return text


def _plugin(name: str, descriptor: Descriptor) -> str:
    text = f"### {name}\n\n{_escape(descriptor.summary)}\n\n"
    if callable(descriptor.fills):
        text += "What it fills depends on its options.\n"
    else:
        rows = [
            (f"[`{role}`](roles.md#{role})", _words(fill.offers), _words(need.capability for need in fill.needs))
            for role, fill in descriptor.fills.items()
        ]
        text += _table(("fills", "offers", "needs"), rows)
    if descriptor.options is None or not attrs.fields(descriptor.options):
        return text
    return f"{text}\n{_options(descriptor.options)}"


def _errors() -> str:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.DsxError)]
    text = "# Errors\n\n" + _prose(errors.__doc__ or "") + "\n\n"
    ordered = sorted(kinds, key=lambda kind: inspect.getsourcelines(kind)[1])
    own = {"RankFailed": "that of the rank"}
    rows = [(f"`{kind.__name__}`", own.get(kind.__name__, str(kind.exit_code)), _lead(kind)) for kind in ordered]
    table = _table(("error", "exit code", "when"), rows)
    return "\n".join([text + table, _class(errors.DsxError), _class(errors.Problem)])


_COMMANDS = """# Command line

Exit codes: 0, 1 failed, 2 misuse, 130 stopped by the keyboard; `dsx run` ends with the code of the rank that failed
first.
"""


def _kernels() -> str:
    """By what the tests of kernels are made of."""
    sys.path.insert(0, str(ROOT / "tests"))
    try:
        page: str = importlib.import_module("kernels.proof").page()
    finally:
        sys.path.remove(str(ROOT / "tests"))
    return page


def _cli() -> str:
    """Core's own commands; those of installed packages are theirs to describe."""
    assert isinstance(group, Commands)
    text = _COMMANDS
    context = click.Context(group, info_name="dsx")
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is not None and (command.callback is None or command.callback.__module__.startswith("dsx.")):
            text += "\n" + "\n".join(_command(command, f"dsx {name}"))
    return text


def _command(command: click.Command, name: str) -> Iterator[str]:
    names = [((p.name or "").upper(), p.required) for p in command.params if isinstance(p, click.Argument)]
    arguments = [argument if required else f"[{argument}]" for argument, required in names]
    yield f"## `{' '.join([name, *arguments])}`\n\n{_escape(inspect.cleandoc(command.help or ''))}\n"
    options = [p for p in command.params if isinstance(p, click.Option)]
    if options:
        rows = [(f"`{', '.join(p.opts)}`", "" if p.is_flag else _kind(p), p.help or "") for p in options]
        yield _table(("option", "value", "meaning"), rows)
    for inner_name, inner in command.commands.items() if isinstance(command, click.Group) else ():
        yield from _command(inner, f"{name} {inner_name}")


def _kind(option: click.Option) -> str:
    return option.metavar or ("a number" if isinstance(option.type, click.IntRange) else option.type.name)


_ITEM = re.compile(r"(?P<names>\w+(, \w+)*)(?:  +|: )(?P<text>\S.*)")


def _prose(doc: str) -> str:
    """Markdown of a docstring: its aligned lists become lists, its indented code stays as it is."""
    lines: list[str] = []
    hang = 0
    for line in inspect.cleandoc(doc).splitlines():
        item = re.fullmatch(r"(\w+(?:, \w+)*)  +(\S.*)", line)
        if item is None and hang:  # the longest name may leave one space only
            item = re.fullmatch(rf"(?=.{{{hang - 1}}} )(\w+) (\S.*)", line)
        if item:
            if not hang and lines and lines[-1]:
                lines.append("")
            lines.append(f"- `{item[1]}`: {_escape(item[2])}")
            hang = item.start(2)
        elif hang and line.startswith(" "):
            lines[-1] += " " + _escape(line.strip())
        else:
            if hang and line:
                lines.append("")
            hang = 0
            lines.append(line if line.startswith("    ") else _escape(line))
    return "\n".join(lines)


def _items(cls: type) -> dict[str, str]:
    """Field name -> its meaning, from the lists in the docstrings of a class and its bases."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        last = ""
        for line in inspect.cleandoc(base.__doc__ or "").splitlines():
            if (item := _ITEM.fullmatch(line.strip())) and not (last and line.startswith("   ")):
                last = item["names"].split(", ")[0]
                found.update(dict.fromkeys(item["names"].split(", "), item["text"]))
            elif last and line.startswith("   "):
                found[last] += " " + line.strip()
            else:
                last = ""
    return found


def _lead(cls: type) -> str:
    """The first paragraph of a docstring."""
    return _escape(" ".join(inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0].split()))


def _escape(text: str) -> str:
    """Outside code, signs that Markdown would take for its own."""
    pieces = re.split(r"(`[^`]*`)", text)
    signs = re.compile(r"(?<=\s)\*(?=[\s*])|\*\*|[<|]")
    return "".join(p if p.startswith("`") else signs.sub(lambda m: "".join(f"\\{c}" for c in m[0]), p) for p in pieces)


def _words(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.strip() for cell in line) + " |" for line in lines) + "\n"


if __name__ == "__main__":
    HOME.mkdir(exist_ok=True)
    for name, text in pages().items():
        (HOME / name).write_text(text, "utf-8")
