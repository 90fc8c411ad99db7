"""The contracts: what each role of a run promises, with the null part of each as its base class.

Plugins import from here, from `dsx.plugin` and from `dsx.errors`, and from nowhere else in dsx.
"""

from dsx.contracts.activations import Activations, Forward
from dsx.contracts.attention import Attend, Attention, Site, check_mask, plain_attention
from dsx.contracts.data import (
    ALIGNMENT,
    Flat,
    Hyper,
    Job,
    Piece,
    Report,
    Run,
    Segment,
    Shard,
    State,
    Unit,
)
from dsx.contracts.dtypes import Dtypes, at_least_fp32
from dsx.contracts.guard import Guard
from dsx.contracts.layout import Ballot, Boundary, Layout, Scope, Watcher
from dsx.contracts.logical import grid, logical_state
from dsx.contracts.memory import comes_back, lasting, memory_of, with_values
from dsx.contracts.observe import Evaluation, Observer, RunInfo
from dsx.contracts.reductions import Bucket, Reductions, Slot, fill_buckets
from dsx.contracts.rule import Groups, Rule, ViewRule
from dsx.contracts.scaler import Scaler
from dsx.contracts.schedule import Schedule
from dsx.contracts.stepper import Stepper
from dsx.contracts.streams import PASSED, Event, Side, pinned
from dsx.contracts.tier import Kind, Span, Store, Tier
from dsx.contracts.transport import (
    CHANNELS,
    Channel,
    Handle,
    Operation,
    Purpose,
    Transport,
    TransportWrapper,
    Wrap,
)
from dsx.contracts.walk import Part, Walk
from dsx.contracts.whole import WholeParameters
from dsx.host import memory as host_memory

CONTRACT = 1
"""Version of these contracts; a plugin's descriptor states the one it was written for."""

__all__ = [
    "ALIGNMENT",
    "CHANNELS",
    "CONTRACT",
    "PASSED",
    "Activations",
    "Attend",
    "Attention",
    "Ballot",
    "Boundary",
    "Bucket",
    "Channel",
    "Dtypes",
    "Evaluation",
    "Event",
    "Flat",
    "Forward",
    "Groups",
    "Guard",
    "Handle",
    "Hyper",
    "Job",
    "Kind",
    "Layout",
    "Observer",
    "Operation",
    "Part",
    "Piece",
    "Purpose",
    "Reductions",
    "Report",
    "Rule",
    "Run",
    "RunInfo",
    "Scaler",
    "Schedule",
    "Scope",
    "Segment",
    "Shard",
    "Side",
    "Site",
    "Slot",
    "Span",
    "State",
    "Stepper",
    "Store",
    "Tier",
    "Transport",
    "TransportWrapper",
    "Unit",
    "ViewRule",
    "Walk",
    "Watcher",
    "WholeParameters",
    "Wrap",
    "at_least_fp32",
    "check_mask",
    "comes_back",
    "fill_buckets",
    "grid",
    "host_memory",
    "lasting",
    "logical_state",
    "memory_of",
    "pinned",
    "plain_attention",
    "with_values",
]
