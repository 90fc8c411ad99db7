"""`dsx new`: a plugin package of one's own."""

from __future__ import annotations

import importlib.util
import keyword
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

from dsx.entries import PLUGINS, Entries
from dsx.errors import DsxError, SlotConflict

_VALID = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_WORDS = "lower-case letters, digits and single underscores between them, starting with a letter: step_decay"

_EXAMPLE = "halving"
"""The plugin of the template, which stands for the new one's name in all forms."""


@click.command()
@click.argument("name")
@click.option(
    "--in",
    "parent",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    metavar="FOLDER",
    help="Where the package's folder is made. Default: here.",
)
def command(name: str, parent: Path) -> None:
    """Make a package with a plugin NAME: a folder dsx-NAME with code, metadata and tests that pass.

    NAME is the plugin's, as manifests will have it. Nothing is overwritten.
    """
    check(name)
    folder = parent / f"dsx-{name.replace('_', '-')}"
    if folder.exists():
        raise DsxError(f"{folder} exists already", remedy="choose another name, or another folder with --in")
    write(folder, name)
    click.echo(f'wrote {folder}; next: cd {folder} && pip install -e ".[test]" && pytest')


def check(name: str) -> None:
    """Refuse a name that no plugin can have, or that is taken."""
    if not _VALID.fullmatch(name) or keyword.iskeyword(name):
        proposal = "_".join(re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()))
        usable = _VALID.fullmatch(proposal) and not keyword.iskeyword(proposal)
        remedy = f"dsx new {proposal}" if usable else None
        raise DsxError(f"'{name}' is no name for a plugin", expected=_WORDS, remedy=remedy)
    if name.startswith("dsx_"):
        raise DsxError(f"'{name}' starts with dsx_, as the package will", remedy=f"dsx new {name.removeprefix('dsx_')}")
    if name in _section_keys():
        raise DsxError(f"'{name}' is a key of [optimize], so no plugin there can have options", remedy="another name")
    taken = [entry for entry in Entries.scan(PLUGINS).registrations if entry.name == name]
    if taken:
        found = " and ".join(map(str, taken))
        raise SlotConflict(f"a plugin '{name}' is installed already", found=found, remedy="choose another name")
    spec = importlib.util.find_spec(f"dsx_{name}")
    if spec is not None:
        where = spec.origin or ", ".join(spec.submodule_search_locations or ())
        raise SlotConflict(f"a package dsx_{name} can be imported already", found=where, remedy="choose another name")


def write(folder: Path, name: str) -> None:
    """Copy the template to `folder`, which must not exist, with its names replaced."""
    template = _template()
    sources = {path.relative_to(template): path.read_text("utf-8") for path in _files(template)}
    renames = _renames(name, sources)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise DsxError(f"{folder} cannot be made: {error.strerror}") from error
    try:
        for place, text in sources.items():
            target = folder / _replaced(str(place), renames)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(_replaced(text, renames), "utf-8")
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise DsxError(f"{folder} cannot be written: {error.strerror}") from error


def _template() -> Path:
    """In a wheel it lies inside the package, in a checkout at the top."""
    package = Path(__file__).parents[1]
    for place in (package / "_template", package.parents[1] / "plugin_template"):
        if (place / "pyproject.toml").is_file():
            return place
    raise DsxError("the template of plugins is missing", where=str(package), remedy="reinstall dsx-engine")


def _files(template: Path) -> Iterator[Path]:
    """Those that are the template's, not what a build or a test run has left in it."""
    for path in sorted(template.rglob("*")):
        parts = path.relative_to(template).parts
        left = any(part in ("__pycache__", "build") or part.startswith(".") or ".egg-info" in part for part in parts)
        if path.is_file() and not left:
            yield path


def _renames(name: str, sources: Mapping[Path, str]) -> dict[str, str]:
    """From each name in the template to the new one; longer ones come first."""
    return {
        "dsx-example": f"dsx-{name.replace('_', '-')}",
        "dsx_example": f"dsx_{name}",
        _EXAMPLE.capitalize(): _class_name(name, sources),
        _EXAMPLE: name,
    }


def _class_name(name: str, sources: Mapping[Path, str]) -> str:
    """CamelCase, and not a word that the template's own code uses."""
    camel = "".join(part.capitalize() for part in name.split("_"))
    used = {word for place, text in sources.items() if place.suffix == ".py" for word in re.findall(r"\w+", text)}
    used.discard(_EXAMPLE.capitalize())
    return f"{camel}Plugin" if camel in used or keyword.iskeyword(camel) else camel


def _replaced(text: str, renames: Mapping[str, str]) -> str:
    """Whole words alone: `test_halving` has the word, `halvings` is prose."""
    words = "|".join(map(re.escape, renames))
    return re.sub(rf"(?<![A-Za-z0-9])({words})(?![A-Za-z0-9])", lambda found: renames[found[1]], text)


def _section_keys() -> set[str]:
    from dsx.manifest.hooks import keys_of
    from dsx.manifest.schema import Optimize

    return set(keys_of(Optimize))
