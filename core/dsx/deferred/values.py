"""Where a model's values come from: it has them, its constructor is replayed, or they are read from files."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from dsx.become import become
from dsx.contracts import Flat
from dsx.deferred.files import Read, WeightFiles, listed, refuse_misfits
from dsx.deferred.guard import unguard
from dsx.deferred.held import held
from dsx.deferred.on_meta import keeping
from dsx.deferred.promise import View, asked_device
from dsx.deferred.replay import real, real_into
from dsx.errors import DsxError


class Values:
    """The null part: a model has its values.

    text  what of this must be the same on all ranks
    """

    text = "its own"

    def fill(self, flat: Flat, exact: Tensor) -> bool:
        """Write the weights of a flat parameter to `exact` [size], of `flat.source`; padding is left alone.

        Returns whether all ranks come to the same values on their own.
        """
        for segment, parameter in zip(flat.segments, flat.parameters, strict=True):
            segment.view(exact).copy_(parameter)
        return False

    def finish(self) -> None:
        """When all parameters are filled: give the model's other tensors their values, in place."""


class LaterValues(Values):
    """Values of a model that has none yet, at least in part, or is to have others.

    device  on which it will be trained; None: where each tensor is, or was asked for
    files   to start from

    Raises `DsxError` naming the tensors whose values nobody knows, and what in the files does not fit.
    """

    def __init__(self, model: nn.Module, device: torch.device | None, files: WeightFiles | None) -> None:
        self._model, self._device, self._files = model, device, files
        self._names = _names(model)
        if files is not None:
            saved = model.state_dict(keep_vars=True)
            tensors = [*model.parameters(), *(b for name, b in model.named_buffers() if name in saved)]
            refuse_misfits(files, {tuple(self._names[id(tensor)]): tensor.shape for tensor in tensors})
        later = [(name, tensor) for name, tensor in held(model) if tensor.is_meta]
        whole = any(id(tensor) in self._names for _, tensor in later)
        _refuse_unknown(name for name, tensor in later if whole and not self._is_known(tensor))
        self.text = repr((files is not None, [name for name, _ in later]))

    def fill(self, flat: Flat, exact: Tensor) -> bool:
        own = True
        with self._reading() as read:
            for segment, parameter in zip(flat.segments, flat.parameters, strict=True):
                target, places = segment.view(exact), self._places(parameter)
                own = own and not places and not parameter.is_meta
                if read is not None and places:
                    target.copy_(_read(places, read))
                elif parameter.is_meta:
                    real_into(target, View.of(parameter))
                else:
                    target.copy_(parameter)
        return not own

    def finish(self) -> None:
        with self._reading() as read:
            for buffer in self._model.buffers():
                if read is not None and (places := self._places(buffer)):
                    self._give(buffer, _read(places, read).to(buffer.dtype, copy=True))
        later = [tensor for _, tensor in held(self._model) if tensor.is_meta and self._is_known(tensor)]
        for tensor, value in zip(later, real([View.of(tensor) for tensor in later]), strict=True):
            self._give(tensor, value)
        for buffer in self._model.buffers():
            if self._device not in (None, buffer.device):
                self._give(buffer, buffer)
        gc.collect()  # steps refer to one another in circles, and may hold what a constructor read from files

    def _is_known(self, tensor: Tensor) -> bool:
        return asked_device(tensor).type != "meta" or bool(self._places(tensor))

    def _places(self, tensor: Tensor) -> Sequence[str]:
        return () if self._files is None else self._files.places(self._names.get(id(tensor), ()))

    def _reading(self) -> AbstractContextManager[Read | None]:
        return nullcontext() if self._files is None else self._files.reading()

    def _give(self, tensor: Tensor, value: Tensor) -> None:
        become(tensor, value.to(self._device or (value if tensor.is_meta else tensor).device))


def values_of(model: nn.Module, device: torch.device | None, weights: str | Path | None) -> Values:
    """Where the values of a model come from that is given to `prepare`."""
    if keeping():
        raise DsxError("dsx.prepare was called within dsx.empty_init()", remedy="leave the context first")
    unguard(model)
    moves = device is not None and any(tensor.device != device for tensor in (*model.parameters(), *model.buffers()))
    if weights is None and not moves and not any(tensor.is_meta for _, tensor in held(model)):
        return Values()
    return LaterValues(model, device, None if weights is None else WeightFiles(weights))


def home(tensor: Tensor) -> torch.device:
    """The device that a tensor is on, or was asked for; the CPU where that is not known."""
    device = asked_device(tensor)
    return torch.empty(0, device="cpu" if device.type == "meta" else device).device


def _names(model: nn.Module) -> Mapping[int, Sequence[str]]:
    """Every name of each parameter and buffer, by id."""
    names: dict[int, list[str]] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            names.setdefault(id(tensor), []).append(name)
    return names


def _refuse_unknown(names: Iterable[str]) -> None:
    unknown = list(names)
    if unknown:
        raise DsxError(
            f"{len(unknown)} tensors of the model are on the meta device, and nobody knows their values",
            found=listed(unknown),
            expected="a model built within `with dsx.empty_init():`, and changed or copied nowhere else",
            remedy="build it there, or give the values: dsx.prepare(..., weights='a safetensors file or folder')",
        )


def _read(places: Sequence[str], read: Read) -> Tensor:
    value = read(places[0])
    for place in places[1:]:
        if not torch.equal(read(place), value):
            raise DsxError(
                f"'{places[0]}' and '{place}' are one parameter in the model, and differ in the weights",
                remedy="build the model without that tie, or remove one of them from the file",
            )
    return value
