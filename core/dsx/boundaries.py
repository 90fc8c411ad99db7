"""Connects the model to the layout: hooks on parameters and around units, and what wraps a unit's forward.

Outside in: boundary hooks, compile, activations, attention sites, the user's forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import attrs
import torch
from torch import Tensor, nn

from dsx.contracts import Activations, Attend, Flat, Layout, Site, Unit
from dsx.errors import DsxError


class Connection:
    """The hooks that `install` made. Gradients pass only while the engine makes a backward."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._open = False
        self._closed = False
        self._undo: list[Callable[[], object]] = []

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Lets gradients through, from any thread."""
        if self._closed:
            raise DsxError(
                "the engine does not train its model any more",
                found="it was closed, or the model was given to dsx.prepare again",
                remedy="use the engine that dsx.prepare returned last",
            )
        self._open = True
        try:
            yield
        finally:
            self._open = False

    def close(self) -> None:
        """Take the hooks away."""
        self._closed = True
        while self._undo:
            self._undo.pop()()

    def undo(self, step: Callable[[], object]) -> None:
        """What `close` has to do."""
        self._undo.append(step)

    def gradient(self, key: str, number: int, parameter: nn.Parameter) -> None:
        """A gradient was accumulated: segment `number` of a flat parameter."""
        if not self._open:
            parameter.grad = None
            raise DsxError(
                "gradients came from a backward that the engine did not make",
                where=f"the parameter '{self._name(key, number)}'",
                found="loss.backward(), or torch.autograd.backward",
                remedy="call engine.backward(loss): it scales the loss and brings the ranks' gradients together",
            )
        self._layout.gradient(key, number, parameter)

    def frozen(self, key: str, number: int, parameter: nn.Parameter) -> None:
        """A parameter that was frozen at set-up has a gradient."""
        parameter.grad = None
        raise DsxError(
            f"the parameter '{self._name(key, number)}' has a gradient, but was frozen at set-up",
            expected="requires_grad as it was in dsx.prepare",
            remedy="set requires_grad before dsx.prepare",
        )

    def _name(self, key: str, number: int) -> str:
        flats = (flat for unit in self._layout.units for flat in unit.flats)
        return next(flat.segments[number].name for flat in flats if flat.key == key)


_CONNECTIONS: weakref.WeakKeyDictionary[Connection, set[int]] = weakref.WeakKeyDictionary()
"""Every connection, with the ids of its parameters."""


def install(
    layout: Layout,
    activations: Sequence[Activations],
    attention: Sequence[tuple[Site, Attend]],
    compile_units: bool,
) -> Connection:
    """Hook the gradients of every parameter, and the boundaries that the layout asks for; give sites their attention.

    An earlier connection of one of these parameters is closed: it would take the gradients.
    """
    connection = Connection(layout)
    flats = [flat for unit in layout.units for flat in unit.flats]
    parameters = [parameter for flat in flats for parameter in flat.parameters]
    disconnect(parameters)
    _CONNECTIONS[connection] = {id(parameter) for parameter in parameters}
    _place(connection, attention)
    for flat in flats:
        _hook_gradients(connection, flat)
    for unit in layout.units:
        for module in unit.modules if unit.index or len(layout.units) == 1 else ():
            _wrap_forward(connection, unit, module, activations, compile_units)
        if layout.boundaries:
            _hook_boundaries(connection, layout, unit)
    return connection


def disconnect(parameters: Iterable[nn.Parameter]) -> None:
    """Close every connection of one of these."""
    mine = {id(parameter) for parameter in parameters}
    for other, theirs in list(_CONNECTIONS.items()):
        if mine & theirs:
            other.close()
            del _CONNECTIONS[other]


def _place(connection: Connection, attention: Sequence[tuple[Site, Attend]]) -> None:
    """All of them, or none where one refuses; given back when the connection is closed, or gone with its engine."""
    try:
        for site, attend in attention:
            give_back = weakref.finalize(connection, site.place(attend))
            give_back.atexit = False
            connection.undo(give_back)
    except DsxError:
        connection.close()
        raise


def _hook_gradients(connection: Connection, flat: Flat) -> None:
    # Autograd holds its hooks where the garbage collector does not look: one that held the layout, which holds the
    # parameters, would keep both, and the transport's threads, for ever.
    weak = weakref.ref(connection)
    for number, parameter in enumerate(flat.parameters):
        if flat.trainable:
            hook = partial(_arrived, weak, flat.key, number)
            handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        elif parameter.is_floating_point():
            hook = partial(_thawed, weak, flat.key, number)
            parameter.requires_grad_(True)  # torch takes a hook only then; it outlasts the next line
            handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            parameter.requires_grad_(False)
        else:
            continue
        connection.undo(handle.remove)


def _arrived(weak: weakref.ref[Connection], key: str, number: int, parameter: nn.Parameter) -> None:
    if (connection := weak()) is not None:
        connection.gradient(key, number, parameter)


def _thawed(weak: weakref.ref[Connection], key: str, number: int, parameter: nn.Parameter) -> None:
    if (connection := weak()) is not None:
        connection.frozen(key, number, parameter)


def _wrap_forward(
    connection: Connection, unit: Unit, module: nn.Module, activations: Sequence[Activations], compile_units: bool
) -> None:
    forward: Callable[..., Any] = module.forward
    for part in reversed(activations):
        forward = part.wrap(unit, forward)
    if compile_units:
        forward = torch.compile(forward)
    if forward is not module.forward:
        before = module.__dict__.get("forward")
        module.forward = forward
        connection.undo(partial(_restore, module, before))


def _restore(module: nn.Module, forward: Callable[..., Any] | None) -> None:
    if forward is None:
        del module.forward
    else:
        module.forward = forward


def _hook_boundaries(connection: Connection, layout: Layout, unit: Unit) -> None:
    wanted = layout.boundaries

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if "enter" in wanted:
            layout.enter(unit)
        inputs = [tensor for tensor in tensors((args, kwargs)) if tensor.requires_grad]
        if "exit" in wanted and inputs and torch.is_grad_enabled():
            _hook_exit(layout, unit, inputs)

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        outputs = [tensor for tensor in tensors(output) if tensor.requires_grad]
        if "back" in wanted and outputs and torch.is_grad_enabled():
            _when(outputs, "any", lambda: layout.back(unit))
        if "leave" in wanted:
            layout.leave(unit)

    for module in unit.modules:
        connection.undo(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True).remove)
        # always: a forward that raises leaves its unit too
        connection.undo(module.register_forward_hook(after, with_kwargs=True, always_call=True).remove)


def _hook_exit(layout: Layout, unit: Unit, inputs: Sequence[Tensor]) -> None:
    """Call `exit` when the inputs' gradients are complete.

    Autograd runs nodes from the last one made to the first, so those of the unit come before the node that made its
    input. A leaf has no such node: its gradient may be complete while work on weights alone (a merged adapter, a norm
    of weights) is still to come. Then the end of this backward is waited for, which in reentrant recomputation is the
    unit's own.
    """
    leaves = [tensor for tensor in inputs if tensor.grad_fn is None]
    if not leaves:
        _when(inputs, "all", lambda: layout.exit(unit))
    for leaf in leaves:
        _hook_leaf(layout, unit, leaf)


def _when(given: Sequence[Tensor], mode: Literal["any", "all"], act: Callable[[], None]) -> None:
    """Call `act` when the gradient of any or all of these is there.

    torch's own hook on several is a cycle that keeps the graph until the collector comes by, and so leaves holes in the
    heap. A single tensor, which is the rule, takes a plain one.
    """
    if len(given) == 1:
        given[0].register_hook(lambda gradient: act())  # type: ignore[no-untyped-call]
    else:
        torch.autograd.graph.register_multi_grad_hook(given, lambda gradients: act(), mode=mode)


def _hook_leaf(layout: Layout, unit: Unit, leaf: Tensor) -> None:
    def complete(gradient: Tensor) -> None:
        handle.remove()  # a leaf may outlive the step, and be given again in the next
        torch.autograd.Variable._execution_engine.queue_callback(lambda: layout.exit(unit))

    handle = leaf.register_hook(complete)  # type: ignore[no-untyped-call]


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested containers, mappings and (data)classes' fields; anything else is left alone."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)
    else:
        for name in _fields(type(value)):
            yield from tensors(getattr(value, name, None))


def _fields(kind: type) -> Sequence[str]:
    """Names of the fields of a dataclass or attrs class, slotted ones too; none for any other."""
    if attrs.has(kind):
        return [field.name for field in attrs.fields(kind)]
    return list(getattr(kind, "__dataclass_fields__", ()))
