"""A small model with everything that breaks trainers: ties, frozen, unused and empty parameters, odd shapes, a side
branch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from dsx.contracts import Attend, plain_attention

VOCABULARY, TOKENS = 23, 7


class Block(nn.Module):
    """Pre-norm residual MLP; `side` adds a branch that not every rank need take."""

    dropout = 0.0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width + 1),
            nn.Linear(3 * width + 1, width),
        )
        self.side = nn.Linear(width, width, bias=False)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, hidden: Tensor, side: bool = False) -> Tensor:
        out: Tensor = hidden + self.gain * self.down(functional.gelu(self.up(self.norm(hidden))))
        if side:
            out = out + self.side(hidden)
        return functional.dropout(out, self.dropout, self.training) if self.dropout else out


class Tangle(nn.Module):
    """A language model of odd sizes.

    The head is tied to the embedding; `frozen` needs no gradient; `never` is used by nobody; `empty` has no elements;
    `rows` is (1, 17), fewer rows than ranks; `gain` of each block is 0-dim.
    """

    def __init__(self, width: int = 17, layers: int = 3, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.rows = nn.Parameter(torch.randn(1, width) / 10)
        self.never = nn.Parameter(torch.ones(5, 3))
        self.empty = nn.Parameter(torch.empty(0))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("offset", torch.linspace(0, 1, width))

    def forward(self, inputs: Tensor, targets: Tensor, side: bool = False) -> Tensor:
        hidden = self.embedding(inputs) + self.rows + self.frozen(self.offset)
        for block in self.blocks:
            hidden = block(hidden, side)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def tokens(step: int, micro: int, rank: int, samples: int = 2) -> tuple[Tensor, Tensor]:
    """The same batch for the same (step, micro, rank): inputs and targets, int64 [samples, TOKENS]."""
    generator = torch.Generator().manual_seed(1_000_000 * step + 1_000 * micro + rank)
    words = torch.randint(0, VOCABULARY, (samples, TOKENS + 1), generator=generator)
    return words[:, :-1], words[:, 1:]


class Noisy(Tangle):
    """The same, with dropout in every block."""

    def __init__(self, width: int = 17, layers: int = 3, seed: int = 0) -> None:
        super().__init__(width, layers, seed)
        for block in self.blocks:
            block.dropout = 0.3  # type: ignore[assignment]


class Slope(nn.Module):
    """A number linear in its weight, by coefficients that depend on the batch."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, 3))

    def forward(self, words: Tensor) -> Tensor:
        grid = torch.arange(self.weight.numel(), dtype=self.weight.dtype).view_as(self.weight)
        return (self.weight * torch.sin(grid + words.sum())).sum()


class Slopes(nn.Module):
    """Its gradients do not depend on its weights. So an update that is made late, or of gradients of older weights,
    comes out as one that is not; one that is lost, made twice or out of turn does not."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Slope(rows) for rows in (1, 11, 23, 5))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return sum((block(inputs) for block in self.blocks), start=torch.zeros(()))


class SelfAttention(nn.Module):
    """An attention site: calls its own attribute `attend`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        # without bias: that of keys changes no output, and Adam would make whole steps of its gradient's rounding
        self.project, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.attend: Attend = plain_attention

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        q, k, v = self.project(hidden).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind()
        heads = self.attend(q, k, v, causal=True)
        out: Tensor = self.out(heads.transpose(1, 2).reshape(batch, length, width))
        return out


class Attentive(Tangle):
    """The same with an attention site before every block."""

    def __init__(self, width: int = 18, layers: int = 2, seed: int = 0) -> None:
        super().__init__(width, layers, seed)
        self.attention = nn.ModuleDict({str(layer): SelfAttention(width, 3) for layer in range(layers)})

    def forward(self, inputs: Tensor, targets: Tensor, side: bool = False) -> Tensor:
        hidden = self.embedding(inputs) + self.rows + self.frozen(self.offset)
        for layer, block in enumerate(self.blocks):
            hidden = block(hidden + self.attention[str(layer)](hidden), side)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())
