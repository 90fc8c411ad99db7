"""The sections of a manifest and their keys, with the defaults that the null parts of core are run with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from attrs import field, frozen

from dsx.manifest.frozen import Table, thaw
from dsx.manifest.ranges import distinct, non_empty, non_negative, positive


@frozen(kw_only=True)
class Run:
    """`[run]`: the run as a whole.

    name              the run's name
    steps             optimizer steps; None: as many as the data gives
    seed              of every random generator
    out               folder of checkpoints and logs; None: runs/<name> (`folder` has it resolved)
    compile           torch.compile of each unit
    overlap_publish   publish parameters while the next pieces are updated; None: the face decides
    empty_init        `dsx run` builds the model without memory (`dsx.empty_init`)
    weights           to start from: a safetensors file, or a folder with one or with an index of several
    """

    name: Annotated[str, non_empty] = "run"
    steps: Annotated[int, positive] | None = None
    seed: Annotated[int, non_negative] = 0
    out: Annotated[str, non_empty] | None = None
    compile: bool = False
    overlap_publish: bool | None = None
    empty_init: bool = True
    weights: Annotated[str, non_empty] | None = None

    @property
    def folder(self) -> Path:
        """Where the run writes."""
        return Path(self.out) if self.out is not None else Path("runs", self.name)


@frozen(kw_only=True)
class BatchKeys:
    """`[batch]` as given, in samples; `dsx.manifest.batch.resolve` fits them to a world size.

    global_        samples per optimizer step, over all ranks (the key is `global`)
    micro          samples per rank and forward pass
    accumulation   micro-batches per optimizer step
    """

    global_: Annotated[int, positive] | None = None
    micro: Annotated[int, positive] | None = None
    accumulation: Annotated[int, positive] | None = None


@frozen(kw_only=True)
class Checkpoint:
    """`[checkpoint]`: one every `every` steps (None: none), the last `keep` of them kept.

    background  write from a copy in host memory, beside the training
    """

    every: Annotated[int, positive] | None = None
    keep: Annotated[int, positive] = 3
    background: bool = False


@frozen(kw_only=True)
class Evaluate:
    """`[evaluate]`: every `every` steps (None: never), over `samples` held-out samples (None: all of them)."""

    every: Annotated[int, positive] | None = None
    samples: Annotated[int, positive] | None = None


@frozen
class Target:
    """`[model]` or `[data]`: a callable, as "module:callable", and the arguments it is called with."""

    path: str
    arguments: Table[Any] = field(factory=Table)

    def keywords(self) -> dict[str, Any]:
        """The arguments as a plain copy, to call with: dicts and lists, as TOML has them."""
        plain: dict[str, Any] = thaw(self.arguments)
        return plain


@frozen(kw_only=True)
class Section:
    """A section that plugins fill: the plugins in use, in order, and the options given to them.

    tables   plugin name -> its options as given; a plugin without options is not in it
    """

    name: str
    use: Annotated[tuple[Annotated[str, non_empty], ...], distinct] = ()
    tables: Table[Table[Any]] = field(factory=Table)


@frozen(kw_only=True)
class Optimize(Section):
    """`[optimize]`: clipping is the engine's, by the norm of all gradients or by the size of each element."""

    clip_norm: Annotated[float, positive] | None = None
    clip_value: Annotated[float, positive] | None = None
