"""Every tensor that a model holds, registered or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

_REGISTERS = ("_parameters", "_buffers", "_modules")


def held(value: object, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Tensor]]:
    """(first name, tensor) of parameters, buffers and attributes of a model, each once.

    Looks into modules, lists, tuples and mappings.
    """
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield path, value
        return
    for name, item in _items(value):
        yield from held(item, path if name in _REGISTERS else f"{path}.{name}" if path else name, seen)


def _items(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, nn.Module):
        named = vars(value)
        # parameters first: a tensor that has a name of its own is known by it
        for register in _REGISTERS:
            yield register, named.get(register, {})
        yield from ((name, item) for name, item in named.items() if name not in _REGISTERS)
    elif isinstance(value, Mapping):
        yield from ((str(key), item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((str(number), item) for number, item in enumerate(value))
