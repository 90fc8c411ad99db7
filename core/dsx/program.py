"""The parts of a run, built and frozen: all that the engine knows."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from dsx.boundaries import Connection
from dsx.contracts import (
    Dtypes,
    Guard,
    Hyper,
    Layout,
    Observer,
    Rule,
    Scaler,
    Schedule,
    Stepper,
    Transport,
)
from dsx.store import Router
from dsx.watch import Watch


@frozen
class Program:
    """One object for each role.

    hypers      base hyperparameters by group
    parameters  names of the trainable parameters, by index
    connection  of the model to the layout
    watch       over the model
    """

    dtypes: Dtypes
    rule: Rule
    transport: Transport
    guard: Guard
    scaler: Scaler
    store: Router
    layout: Layout
    stepper: Stepper
    schedule: Schedule
    observers: tuple[Observer, ...]
    hypers: Mapping[str, Hyper]
    parameters: tuple[str, ...]
    connection: Connection
    watch: Watch
