"""The systems by name: in which module each is made, with which options."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class System:
    """`function(model, case, **options)` of a module makes it.

    imports  modules that it would import when it is made, for imports to be told from what it holds
    alike    it trains what the reference does, so their losses are compared
    """

    module: str
    function: str
    options: dict[str, object] = field(default_factory=dict)
    imports: list[str] = field(default_factory=lambda: ["torch._dynamo"])
    alike: bool = True


def _deepspeed(stage: int, offload: str | None = None) -> System:
    # From stage 1 on it looks whether the optimizer is its Muon, whose module compiles a function.
    imports = ["torch._dynamo"] + ["deepspeed.runtime.zero.muon.muon_optimizer"] * (stage > 0)
    return System(DEEPSPEED, "stage", {"number": stage, "offload": offload}, imports)


def _dsx(layout: str | None, offload: str | None = None, early: bool = False) -> System:
    imports = ["dsx.start", "dsx_optimizers.adamw"] + [f"dsx_zero.{layout}"] * (layout is not None)
    imports += [f"dsx_offload.{offload}_offload", "dsx.plan.rooms"] * (offload is not None)
    imports += ["dsx_offload.early_update"] * early
    return System("of_dsx", "layout", {"name": layout, "offload": offload, "early": early}, imports)


def _dsx_rule(rule: str, layout: str | None = None, overlapped: bool = True, **numbers: int) -> System:
    options = {"name": layout, "rule": rule, "overlapped": overlapped, "numbers": numbers}
    folder = "dsx_optimizers" if rule == "adamw" else "dsx_onebit"
    imports = ["dsx.start", f"{folder}.{rule}"] + [f"dsx_zero.{layout}"] * (layout is not None)
    return System("of_dsx", "layout", options, imports, alike=rule == "adamw")


REFERENCE = "ddp"
DEEPSPEED = "of_deepspeed"

SYSTEMS = {
    REFERENCE: System("of_torch", "ddp"),
    "ddp-again": System("of_torch", "ddp"),
    "ddp-views": System("of_torch", "ddp", {"views": True}),
    "zero-redundancy": System("of_torch", "zero_redundancy"),
    "fsdp2": System("of_torch", "fsdp2", {"reshard": True}),
    "fsdp2-keep": System("of_torch", "fsdp2", {"reshard": False}),
    **{f"deepspeed-{stage}": _deepspeed(stage) for stage in range(4)},
    "dsx-replicated": _dsx(None),
    **{f"dsx-{layout}": _dsx(layout) for layout in ("zero1", "zero2", "zero3")},
    "deepspeed-1-host": _deepspeed(1, offload="cpu"),
    "deepspeed-3-disk": _deepspeed(3, offload="nvme"),
    "dsx-zero1-host": _dsx("zero1", offload="cpu"),
    **{f"dsx-{layout}-disk": _dsx(layout, offload="nvme") for layout in ("zero1", "zero2", "zero3")},
    **{f"dsx-{layout}-disk-early": _dsx(layout, offload="nvme", early=True) for layout in ("zero1", "zero2", "zero3")},
    "dsx-after-backward": _dsx_rule("adamw", overlapped=False),
    "dsx-onebit": _dsx_rule("onebit_adam", freeze=1),
    "dsx-lamb": _dsx_rule("onebit_lamb", freeze=1 << 30),
    "dsx-lamb-zero1": _dsx_rule("onebit_lamb", "zero1", freeze=1 << 30),
    "dsx-onebit-run": _dsx_rule("onebit_adam", freeze=15),  # after 7 rounds, of two steps each after the first step
    "dsx-onebit-zero1": _dsx_rule("onebit_adam", "zero1", freeze=1),
    "dsx-onebit-lamb": _dsx_rule("onebit_lamb", freeze=1),
    "dsx-onebit-lamb-zero1": _dsx_rule("onebit_lamb", "zero1", freeze=1),
    "dsx-onebit-01": _dsx_rule("zero_one_adam", freeze=1, local_limit=1),
    "dsx-onebit-01-apart": _dsx_rule("zero_one_adam", freeze=1, local_scale=1, local_limit=1 << 20),
}
UNASKED = [
    name
    for name in SYSTEMS
    if name.endswith(("-host", "-disk", "-early", "-backward")) or "onebit" in name or "lamb" in name
]
"""Those that are other trainings, or slower for what they save: measured when they are named."""

LABELS = {
    REFERENCE: "DDP",
    "ddp-again": "DDP again (control)",
    "ddp-views": "DDP, gradients as views",
    "zero-redundancy": "ZeroRedundancyOptimizer",
    "fsdp2": "FSDP2",
    "fsdp2-keep": "FSDP2, no reshard",
    "deepspeed-0": "DeepSpeed 0",
    "deepspeed-1": "DeepSpeed 1",
    "deepspeed-2": "DeepSpeed 2",
    "deepspeed-3": "DeepSpeed 3",
    "dsx-replicated": "dsx replicated",
    "dsx-zero1": "dsx zero1",
    "dsx-zero2": "dsx zero2",
    "dsx-zero3": "dsx zero3",
    "deepspeed-1-host": "DeepSpeed 1, states on the host",
    "deepspeed-3-disk": "DeepSpeed 3, states in files",
    "dsx-zero1-host": "dsx zero1, states on the host",
    "dsx-zero1-disk": "dsx zero1, states in files",
    "dsx-zero2-disk": "dsx zero2, states in files",
    "dsx-zero3-disk": "dsx zero3, states in files",
    **{
        f"dsx-{layout}-disk-early": f"dsx {layout}, states in files, early_update"
        for layout in ("zero1", "zero2", "zero3")
    },
    "dsx-after-backward": "dsx replicated, reduced after backward",
    "dsx-onebit": "dsx onebit_adam",
    "dsx-lamb": "dsx LAMB",
    "dsx-lamb-zero1": "dsx LAMB, zero1",
    "dsx-onebit-run": "dsx onebit_adam, frozen after 15 steps",
    "dsx-onebit-zero1": "dsx onebit_adam, zero1",
    "dsx-onebit-lamb": "dsx onebit_lamb",
    "dsx-onebit-lamb-zero1": "dsx onebit_lamb, zero1",
    "dsx-onebit-01": "dsx zero_one_adam, an exchange in each update",
    "dsx-onebit-01-apart": "dsx zero_one_adam, between exchanges",
}
