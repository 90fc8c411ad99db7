"""A GPT of today's shape: rotary positions, RMSNorm, SwiGLU, grouped queries, tied embedding and head."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsx.contracts import Attend, plain_attention
from dsx.errors import DsxError

IGNORED = -100
"""A label that counts for nothing, as in torch and Hugging Face."""


def gpt(
    *,
    vocab: int = 256,
    layers: int = 4,
    width: int = 128,
    heads: int = 4,
    kv_heads: int | None = None,
    context: int = 256,
    hidden: int | None = None,
    tied: bool = True,
    dropout: float = 0.0,
    rope_base: float = 10000.0,
) -> GPT:
    """Build a decoder-only language model; seed torch first for the same weights again.

    vocab, context   token ids are below `vocab`, sequences at most `context` tokens
    width, heads     `heads` divides `width`, and a head's width is even (rotary positions turn pairs)
    kv_heads         heads of keys and values, each shared by heads / kv_heads queries; default: `heads`
    hidden           width inside the SwiGLU; default: 8/3 width, rounded up to a multiple of 16
    tied             the head's weight is the embedding's
    dropout          on the embedding and on what each branch adds, in [0, 1)
    rope_base        the longest wavelength of the rotary positions, in tokens, over 2 pi

    Raises `DsxError` naming the argument that does not fit.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    _check_sizes(vocab=vocab, layers=layers, width=width, heads=heads, kv_heads=kv_heads, context=context)
    hidden = -(-8 * width // 48) * 16 if hidden is None else hidden
    _check_sizes(hidden=hidden)
    if width % heads:
        raise _misfit("heads", heads, f"a divisor of width = {width}")
    if width // heads % 2:
        raise _misfit("heads", heads, f"heads of even width, for rotary positions; width / heads is {width // heads}")
    if heads % kv_heads:
        raise _misfit("kv_heads", kv_heads, f"a divisor of heads = {heads}")
    if not 0.0 <= dropout < 1.0:
        raise _misfit("dropout", dropout, "a number from 0 to below 1")
    if not rope_base > 1.0:
        raise _misfit("rope_base", rope_base, "a number above 1")
    blocks = [Block(width, heads, kv_heads, hidden, dropout) for _ in range(layers)]
    return GPT(blocks, vocab=vocab, width=width, context=context, tied=tied, dropout=dropout, rope_base=rope_base)


def _check_sizes(**sizes: object) -> None:
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise _misfit(name, size, "a whole number of at least 1")


def _misfit(name: str, value: object, expected: str) -> DsxError:
    return DsxError(
        f"dsx_text:gpt cannot be built with {name} = {value!r}",
        expected=expected,
        remedy=f"change {name} in [model]",
    )


class GPT(nn.Module):
    """What `gpt` builds: an embedding, `blocks`, a norm and a head."""

    def __init__(
        self, blocks: list[Block], *, vocab: int, width: int, context: int, tied: bool, dropout: float, rope_base: float
    ) -> None:
        super().__init__()
        self.context, self.tied, self.dropout = context, tied, dropout
        self.head_dim, self.rope_base = blocks[0].attention.head_dim, rope_base
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, vocab, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Tie and initialise every weight; after a build on the meta device, call it once `to_empty` gave memory.

        Matrices are normal with deviation 0.02, and those that add to the residual stream 1 / sqrt(2 layers) of it, so
        that the stream's variance does not grow with depth; norms start at 1.
        """
        if self.tied:
            self.head.weight = self.embedding.weight
        residual = 0.02 / math.sqrt(2 * len(self.blocks))
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                nn.init.ones_(parameter)
            else:
                adds = name.endswith(("attention.out.weight", "mlp.down.weight"))
                nn.init.normal_(parameter, std=residual if adds else 0.02)

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, segments: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The logits of each next token, or the loss where labels are given.

        input_ids  int64 [batch, tokens], tokens <= context
        labels     int64 [batch, tokens], labels[:, t] being the token after input_ids[:, t]; -100 is ignored
        segments   int64 [batch, tokens], the document of each token, which sees no other; None: one document

        Returns {"logits": [batch, tokens, vocab]} in the model's dtype, or {"loss": fp32 scalar}: the mean over the
        labels that count, in nats per token; 0 if none does. Raises `DsxError` for ids that do not fit the model.
        """
        logits: Tensor = self.head(self._encode(input_ids, segments))
        if labels is None:
            return {"logits": logits}
        labels = labels.flatten()
        total = F.cross_entropy(logits.flatten(0, 1).float(), labels, ignore_index=IGNORED, reduction="sum")
        return {"loss": total / (labels != IGNORED).sum().clamp(min=1)}

    def _encode(self, input_ids: Tensor, segments: Tensor | None) -> Tensor:
        tokens = input_ids.size(-1)
        if input_ids.dim() != 2 or tokens > self.context:
            raise DsxError(
                f"the model cannot read input_ids of shape {list(input_ids.shape)}",
                expected=f"[batch, tokens] with at most context = {self.context} tokens",
                remedy="cut the sequences, or raise context in [model]",
            )
        x = F.dropout(self._embed(input_ids), self.dropout, self.training)
        rotation = rotation_table(tokens, self.head_dim, self.rope_base, x.device)
        for block in self.blocks:
            x = block(x, rotation, segments)
        hidden: Tensor = self.norm(x)
        return hidden

    def _embed(self, input_ids: Tensor) -> Tensor:
        try:
            embedded: Tensor = self.embedding(input_ids)
        except IndexError:
            raise DsxError(
                f"a token id is outside the model's vocabulary of {self.embedding.num_embeddings}",
                found=f"ids from {int(input_ids.min())} to {int(input_ids.max())}",
                remedy="set vocab in [model] to the size of the data's vocabulary",
            ) from None
        return embedded

    @torch.no_grad()
    def generate(
        self,
        ids: Tensor,
        tokens: int,
        temperature: float = 0.8,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue `ids`, int64 [batch, prompt], by `tokens` more: int64 [batch, prompt + tokens].

        temperature  0 takes the likeliest token; 1 samples from the model's own distribution
        top_k        sample among the k likeliest alone
        generator    on the model's device; default: torch's

        Each token reads the last `context` ones anew: no cache, so whatever attends in the model's place, and however
        its weights are spread, text comes out as the model would be evaluated. Call `eval()` first if it has dropout.
        """
        for _ in range(tokens):
            logits = self(ids[:, -self.context :])["logits"][:, -1].float()
            ids = torch.cat((ids, _pick(logits, temperature, top_k, generator)), dim=1)
        return ids


def _pick(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Draw one token from each row: [batch, vocab] -> int64 [batch, 1]."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if top_k is not None:
        least = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    return torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)


class Block(nn.Module):
    """Attention and a SwiGLU, each after a norm and added to the stream."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.attention_norm = nn.RMSNorm(width, eps=1e-6)
        self.attention = Attention(width, heads, kv_heads)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-6)
        self.mlp = SwiGLU(width, hidden)

    def forward(self, x: Tensor, rotation: Tensor, segments: Tensor | None = None) -> Tensor:
        """[batch, tokens, width] -> the same; `rotation` as from `rotation_table`, `segments` as in `GPT`."""
        x = x + F.dropout(self.attention(self.attention_norm(x), rotation, segments), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.mlp_norm(x)), self.dropout, self.training)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped queries; a site of the role `attention`."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, width // heads
        self.attend: Attend = plain_attention
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor, segments: Tensor | None = None) -> Tensor:
        """[batch, tokens, width] -> the same."""
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        qk, v = heads.split_with_sizes((self.heads + self.kv_heads, self.kv_heads), dim=1)
        q, k = rotate(qk, rotation).split_with_sizes((self.heads, self.kv_heads), dim=1)
        y = self.attend(q, k, v, causal=True, segments=segments)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] -> the same."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


def rotation_table(tokens: int, head_dim: int, base: float, device: torch.device) -> Tensor:
    """Cosines and signed sines of the rotary positions: fp32 [2, tokens, head_dim] (Su et al. 2021, equation 34).

    Dimension j turns with dimension j + head_dim / 2, by position * base ** (-2 j / head_dim). Computed from the
    positions at each use (some 30 us): a buffer would be rounded by `.bfloat16()` and left empty by the meta device.
    """
    pairs = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
    positions = torch.arange(tokens, device=device, dtype=torch.float32)
    angles = positions[:, None] * base ** (-pairs / head_dim)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn each head by its position, in fp32: [batch, heads, tokens, head_dim] -> the same shape and dtype."""
    cos, sin = rotation
    y = x.float()
    return torch.addcmul(y * cos, y.roll(x.size(-1) // 2, dims=-1), sin).to(x.dtype)
