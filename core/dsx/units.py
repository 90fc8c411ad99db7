"""Cuts a model into units, and the parameters of each unit into flat parameters."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from attrs import frozen
from torch import nn

from dsx.contracts import ALIGNMENT, Dtypes, Flat, Groups, Segment, Unit
from dsx.errors import DsxError


@frozen
class Entry:
    """A parameter on its way into a flat one."""

    name: str
    parameter: nn.Parameter
    group: str
    index: int


def plain(model: nn.Module) -> nn.Module:
    """The model itself where `torch.compile(model)` was given: names must not depend on it."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) of the members of the model's longest `ModuleList`; each module once. [] if it has none."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        return []
    prefix, longest = max(lists, key=lambda item: len(item[1]))
    members = {id(module): (f"{prefix}.{key}" if prefix else key, module) for key, module in longest.named_children()}
    return list(members.values())


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """First name and object of each parameter that requires gradients; their order numbers them."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def flatten(
    model: nn.Module,
    *,
    dtypes: Dtypes,
    groups: Groups,
    world: int,
    block: int = 1,
    limit_bytes: int | None = None,
    merge_bytes: int = 0,
    choose: Callable[[nn.Module], Sequence[tuple[str, nn.Module]]] = blocks,
) -> tuple[Unit, ...]:
    """Cut a model into units of flat parameters; the root unit, with what is in no block, comes first.

    world        size of the data axis; every flat parameter divides by it
    block        of the rule: parameters start at its multiples, and the ranks' parts are multiples of it
    limit_bytes  cut a unit's flat parameters at this size, never within a parameter
    merge_bytes  blocks smaller than this join their neighbours in a unit until it is of this size
    choose       (name, module) of the blocks
    """
    model = plain(model)
    chosen = _merged(choose(model), merge_bytes)
    homes = _homes(model, [modules for _, modules in chosen])
    numbers = {name: index for index, name in enumerate(trainable(model))}
    align = math.lcm(ALIGNMENT, block)
    members: list[list[Entry]] = [[] for _ in range(len(chosen) + 1)]
    for name, parameter in model.named_parameters():
        if parameter.layout != torch.strided:
            raise DsxError(f"the parameter '{name}' has the layout {parameter.layout}", expected="a dense tensor")
        group = groups.assign(name, parameter) if parameter.requires_grad else ""
        members[homes[id(parameter)]].append(Entry(name, parameter, group, numbers.get(name, -1)))
    units = []
    for number, (name, modules) in enumerate([("", (model,)), *chosen]):
        flats = []
        for key, dtype, entries in _flats(members[number], dtypes, limit_bytes):
            flats.append(_flat(f"{name or 'root'}:{key}", dtype, entries, align, world))
        units.append(Unit(number, name, modules, tuple(flats)))
    return tuple(units)


def _merged(chosen: Sequence[tuple[str, nn.Module]], merge_bytes: int) -> Sequence[tuple[str, tuple[nn.Module, ...]]]:
    """(name of the first, modules) of each unit: neighbours that are small, together."""
    units: list[tuple[str, tuple[nn.Module, ...]]] = []
    room = 0
    for name, module in chosen:
        size = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
        if room > 0 and size < merge_bytes:
            first, members = units.pop()
            units.append((first, (*members, module)))
            room -= size
        else:
            units.append((name, (module,)))
            room = merge_bytes - size
    return units


def _homes(model: nn.Module, chosen: Sequence[tuple[nn.Module, ...]]) -> Mapping[int, int]:
    """By id of a parameter, the number of the lowest unit that holds all its uses; 0 is the root."""
    uses: Counter[int] = Counter()
    homes: dict[int, int] = {}
    inside: set[int] = set()
    for number, members in enumerate(chosen, 1):
        inside.update(id(module) for block in members for module in block.modules())
        for parameter in {parameter for block in members for parameter in block.parameters()}:
            uses[id(parameter)] += 1
            homes[id(parameter)] = number
    outside = {
        id(parameter)
        for module in model.modules()
        if id(module) not in inside
        for parameter in module.parameters(recurse=False)
    }
    return {
        id(parameter): homes[id(parameter)] if uses[id(parameter)] == 1 and id(parameter) not in outside else 0
        for parameter in model.parameters()
    }


def _flats(
    entries: Sequence[Entry], dtypes: Dtypes, limit_bytes: int | None
) -> Iterator[tuple[str, torch.dtype, list[Entry]]]:
    """(key, dtype, entries) of each flat parameter of one unit: by dtypes and `requires_grad`, cut at the limit."""
    kinds: dict[tuple[torch.dtype, torch.dtype, bool], list[Entry]] = {}
    for entry in entries:
        source = entry.parameter.dtype
        dtype = dtypes.param(entry.name, source) if source.is_floating_point else source
        kinds.setdefault((dtype, source, entry.parameter.requires_grad), []).append(entry)
    names: Counter[str] = Counter()
    for (dtype, source, grad), several in kinds.items():
        for part in _cut(several, dtype, limit_bytes):
            key = f"{str(dtype).removeprefix('torch.')}{'' if grad else '.frozen'}"
            key += "" if dtype == source else f".from_{str(source).removeprefix('torch.')}"
            names[key] += 1
            yield (key if names[key] == 1 else f"{key}.{names[key]}"), dtype, part


def _cut(entries: list[Entry], dtype: torch.dtype, limit_bytes: int | None) -> Iterator[list[Entry]]:
    part: list[Entry] = []
    size = 0
    for entry in entries:
        more = entry.parameter.numel() * dtype.itemsize
        if part and limit_bytes is not None and size + more > limit_bytes:
            yield part
            part, size = [], 0
        part.append(entry)
        size += more
    yield part


def _flat(key: str, dtype: torch.dtype, entries: Sequence[Entry], align: int, world: int) -> Flat:
    segments, at = [], 0
    for entry in entries:
        stop = at + entry.parameter.numel()
        segments.append(Segment(entry.name, at, stop, entry.parameter.shape, entry.group, entry.index))
        at = -(-stop // align) * align
    size = -(-max(at, 1) // (align * world)) * align * world
    first = entries[0].parameter
    parameters = tuple(entry.parameter for entry in entries)
    return Flat(key, dtype, first.dtype, first.requires_grad, tuple(segments), parameters, size)
