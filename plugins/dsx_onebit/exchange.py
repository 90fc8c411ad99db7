"""Signs to the owner of each part of a flat parameter, their mean, and its signs to everyone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from dsx.contracts import Flat, Job, Transport
from dsx_kernels.signs import signs
from dsx_kernels.signs_mean import signs_mean
from dsx_onebit.steps import share_of

WORD = 32
"""Signs in an int32."""


@frozen
class Share:
    """A gradient that is added to a momentum on its way into signs; the sum is nowhere written.

    gradient, factor  [size]; factor None: 1
    spans             (where, numbers of `signs`), together all of [size]
    """

    gradient: Tensor
    factor: Tensor | None
    spans: Sequence[tuple[slice, Mapping[str, Any]]]

    @classmethod
    def of(
        cls, flat: Flat, gradient: Tensor, factor: Tensor | None, job: Job, ratios: Sequence[float] | None = None
    ) -> Share:
        """What `steps.add_gradient` would add; parameters that are not used are left out by the counts.

        ratios  of each parameter of the flat one, on its factors; None: 1
        """
        spans: list[tuple[slice, Mapping[str, Any]]] = []
        for number, segment in enumerate(flat.segments):
            mine = share_of(job.hypers[segment.group], job, ratios[number] if ratios else 1.0)
            if spans and spans[-1][1] == mine:
                continue
            if spans:
                spans[-1] = slice(spans[-1][0].start, segment.start), spans[-1][1]
            spans.append((slice(segment.start if spans else 0, flat.size), mine))
        return cls(gradient, factor, spans)


class Exchange:
    """What ranks send one another of a flat parameter: for each 1/N of it, its signs and the scales of its blocks.

    Both halves compress with error feedback, so what one exchange loses is in a later one. Both are generators, which
    pause where they wait for the others.

    block  elements with one scale
    """

    def __init__(self, transport: Transport, block: int) -> None:
        self._transport, self._block = transport, block
        self._counts: dict[str, tuple[tuple[bool, ...], Tensor]] = {}

    def own(self, flat: Flat) -> slice:
        """The part of a flat parameter that this rank owns."""
        return slice(*flat.part(self._transport.rank, self._transport.world))

    def counts(self, flat: Flat, used: Sequence[bool], device: torch.device) -> Tensor:
        """int32 [size / block]: elements of each block that belong to a parameter which is used; the rest of it is
        padding."""
        mine = tuple(used[segment.index] for segment in flat.segments)
        known = self._counts.get(flat.key)
        if known is None or known[0] != mine:
            counts = torch.zeros(flat.size // self._block, dtype=torch.int32)
            for segment, counted in zip(flat.segments, mine, strict=True):
                if counted:
                    first, (whole, rest) = (
                        segment.start // self._block,
                        divmod(segment.stop - segment.start, self._block),
                    )
                    counts[first : first + whole] = self._block
                    if rest:
                        counts[first + whole] = rest
            self._counts[flat.key] = known = mine, counts.to(device)
        return known[1]

    def average(
        self, value: Tensor | None, error: Tensor, counts: Tensor, out: Tensor, share: Share | None = None
    ) -> Iterator[None]:
        """The mean over ranks of `value + error`, as far as signs tell it, of the part that this rank owns.

        value, error  [size]; error becomes what the signs did not tell; no value: the share alone
        out           [size / N], written where `counts` counts; may be a part of `value`
        share         of a gradient in the value
        """
        x, size = self._transport, out.numel()
        sent, came = (self._messages(size, error) for _ in range(2))
        each = size // self._block
        bits, scales = self._parts(sent, size, error)
        for rank in range(x.world):
            self._compress(rank * size, value, error, counts, bits[rank], scales[rank], share)
        handle = x.all_to_all(list(came), list(sent), channel="rule", purpose="rule")
        yield
        handle.wait()
        signs_mean(*self._parts(came, size, error), counts[x.rank * each : (x.rank + 1) * each], out)

    def spread(
        self, value: Tensor | None, error: Tensor, counts: Tensor, out: Tensor, share: Share | None = None
    ) -> Iterator[None]:
        """Every owner's `value + error`, as far as signs tell it, on all ranks.

        value, error  [size / N]; error becomes what the signs did not tell; no value: the share alone
        share         of a gradient, or what takes its place, in the value
        out           [size], the same bits on every rank, written where `counts` counts; `value` may be a part of it
        """
        x, size = self._transport, error.numel()
        messages = self._messages(size, error)
        bits, scales = self._parts(messages, size, error)
        each = size // self._block
        mine = counts[x.rank * each : (x.rank + 1) * each]
        self._compress(0, value, error, mine, bits[x.rank], scales[x.rank], share)
        handle = x.all_gather(messages.view(-1), messages[x.rank], channel="rule", purpose="rule")
        yield
        handle.wait()
        for rank in range(x.world):
            part, blocks = slice(rank * size, (rank + 1) * size), slice(rank * each, (rank + 1) * each)
            signs_mean(bits[rank : rank + 1], scales[rank : rank + 1], counts[blocks], out[part])

    def _compress(
        self,
        start: int,
        value: Tensor | None,
        error: Tensor,
        counts: Tensor,
        bits: Tensor,
        scales: Tensor,
        share: Share | None,
    ) -> None:
        """Signs of the part from `start` on; bits [part / 32], scales [part / block], the others are whole."""
        stop, block = start + bits.numel() * WORD, self._block
        whole: tuple[slice, Mapping[str, Any]] = slice(start, stop), {}
        for where, numbers in share.spans if share else [whole]:
            low, high = max(where.start, start), min(where.stop, stop)
            if low >= high:
                continue
            here, words, blocks = (
                slice(low, high),
                slice((low - start) // WORD, (high - start) // WORD),
                slice((low - start) // block, (high - start) // block),
            )
            signs(
                None if value is None else value[here],
                error[here],
                counts[low // block : high // block],
                bits[words],
                scales[blocks],
                share.gradient[here] if share else None,
                None if share is None or share.factor is None else share.factor[here],
                **numbers,
            )

    def _messages(self, size: int, like: Tensor) -> Tensor:
        """int32 [N, words], one message of signs and scales for each rank."""
        words = size // WORD + size // self._block * (_wide(like).itemsize // 4)
        return torch.empty(self._transport.world, words, dtype=torch.int32, device=like.device)

    def _parts(self, messages: Tensor, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Signs [N, size / 32] and scales [N, size / block] of messages."""
        return messages[:, : size // WORD], messages[:, size // WORD :].view(_wide(like))


def _wide(like: Tensor) -> torch.dtype:
    """In which scales are: as the kernels compute."""
    return torch.float64 if like.dtype == torch.float64 else torch.float32
