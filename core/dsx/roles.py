"""The roles of a run: which hook fills each, how many fillers it takes, and the order in which parts are built."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

Section = Literal["precision", "communicate", "partition", "optimize", "attention", "observe"]

Kind = Literal["one", "chain", "claims"]
"""one: a single filler; chain: many, outermost first in manifest order; claims: many, each taking its own states or
sites."""


@frozen
class Role:
    """One thing that a part can do in a run.

    section  of the manifest, and of the hook, that fills it
    null     what happens where no plugin fills it, in words
    """

    name: str
    section: Section
    kind: Kind
    null: str


BUILD_ORDER = (
    Role("dtypes", "precision", "one", "every parameter keeps its dtype"),
    Role("groups", "optimize", "one", "one group"),
    Role("rule", "optimize", "one", "AdamW, torch's own kernel and defaults"),
    Role("transport", "communicate", "one", "torch.distributed, or none for one process"),
    Role("wrappers", "communicate", "chain", "none"),
    Role("guard", "precision", "one", "torch's norm; a non-finite gradient skips the step"),
    Role("scaler", "precision", "one", "scale 1"),
    Role("tiers", "partition", "claims", "device memory"),
    Role("layout", "partition", "one", "replicated on every rank"),
    Role("activations", "partition", "chain", "kept"),
    Role("attention", "attention", "claims", "the model's own"),
    Role("stepper", "optimize", "one", "inline"),
    Role("schedule", "optimize", "one", "the same at every step"),
    Role("observers", "observe", "chain", "nobody listens"),
)
"""Hook order cannot be build order: a layout must know the rule's states and the parameter groups, a rule the
transport's size. So hooks return builders, and core calls them in this order."""

ROLES = {role.name: role for role in BUILD_ORDER}

SECTIONS: tuple[Section, ...] = ("precision", "communicate", "partition", "optimize", "attention", "observe")
