"""What operations on the meta device would take: memory at any instant, arithmetic, bytes moved."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from dsx.deferred.on_meta import META, each
from dsx.errors import DsxError
from dsx.plan.shapes import result as result_of

Account = Callable[[], Mapping[tuple[str, str], int]]
"""What parts hold now: bytes by (where, name)."""


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is done on the meta device within its context.

    peak     bytes at the worst instant since `begin`
    at_peak  what `account` said then
    flops    of matrix products and convolutions, by dtype name, and of attention, by "float32 attention" and the like
    moved    bytes that other operations read and write, by phase
    calls    operations, by phase
    read     how often a number was read that has no value; it is taken to be 1
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes: dict[int, int] = {}
        self._others = 0
        self._followed: dict[int, torch.UntypedStorage] = {}
        self._account: Account = dict
        self.phase = ""
        self.begin()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled within; torch would import all of its compiler to leave it out."""
        return False

    def begin(self, account: Account = dict) -> None:
        """Forget all but what is held. `account` is asked at every new peak."""
        self._account, self.peak = account, 0
        self.at_peak: Mapping[tuple[str, str], int] = {}
        self.flops: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.read = 0

    def follow(self, tensors: Iterable[Tensor]) -> None:
        """The memory of these may come and go while they live: it is looked up, not remembered."""
        with torch._C.DisableTorchFunctionSubclass():  # a layout may guard parameters whose memory is not there
            storages = [tensor.untyped_storage() for tensor in tensors]
        for storage in storages:
            self._others -= self._sizes.pop(storage._cdata, 0)
            self._followed[storage._cdata] = storage

    @property
    def live(self) -> int:
        """Bytes held now."""
        return self._others + sum(storage.nbytes() for storage in self._followed.values())

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """What is counted within belongs to `phase`."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = _on_paper(func, args, kwargs or {})
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            self.read += 1
            return 1.0 if args[0].is_floating_point() else 1
        result = _done(func, args, kwargs)
        results = [tensor for tensor in each(Tensor, result) if tensor.is_meta]
        made = [self._hold(tensor) for tensor in results]
        if any(made):
            self._look()
        if any(made) or func._schema.is_mutable:
            self._count(func, args, kwargs, result, results)
        return result

    def _hold(self, tensor: Tensor) -> bool:
        """Whether its memory is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes or key in self._followed:
            return False
        self._sizes[key] = size = storage.nbytes()
        self._others += size
        weakref.finalize(storage, self._gone, key)
        return True

    def _gone(self, key: int) -> None:
        self._others -= self._sizes.pop(key, 0)

    def _look(self) -> None:
        if (live := self.live) > self.peak:
            self.peak, self.at_peak = live, self._account()

    def _count(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, results: Sequence[Tensor]
    ) -> None:
        self.calls[self.phase] += 1
        count = _flops_of(func, args, kwargs, result)
        if count is not None:
            dtype = str(results[0].dtype).removeprefix("torch.")
            self.flops[f"{dtype} attention" if "attention" in func._schema.name else dtype] += count
            return
        touched = [tensor for tensor in each(Tensor, (args, kwargs)) if tensor.is_meta]
        changed = {id(tensor) for tensor in results} - {id(tensor) for tensor in touched}
        written = [tensor for tensor in results if id(tensor) in changed]
        self.moved[self.phase] += sum(_bytes(tensor) for tensor in (*touched, *written))


def _done(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operation returns."""
    if (known := result_of(func, args, kwargs)) is not NotImplemented:
        return known
    try:
        return func(*args, **kwargs)
    except NotImplementedError as error:
        if func._schema.is_mutable and not func._schema.returns:
            return None
        raise DsxError(
            f"the operation {func._schema.name} cannot be made on paper",
            found="it has no kernel for the meta device",
            remedy="register one with torch.library.register_fake; until then the run can be made, but not planned",
        ) from error


def _on_paper(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Arguments that go together: beside a tensor without values, only the sizes of others count."""
    tensors = each(Tensor, (args, kwargs))
    if not any(tensor.is_meta for tensor in tensors):
        return args, kwargs
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": META, **({"pin_memory": False} if "pin_memory" in kwargs else {})}
    if any(not tensor.is_meta and tensor.dim() > 0 for tensor in tensors):
        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(META), (tuple(args), dict(kwargs)))
    return args, kwargs


_CPU_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


@cache
def _formulas() -> Mapping[Any, Callable[..., Any]]:
    """torch's, by operation; imported no earlier, since triton is with it, where it is installed."""
    from torch.utils.flop_counter import flop_registry

    return flop_registry


def _flops_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int | None:
    """Multiplications and additions of a product; None for what is bound by memory instead."""
    formula = _formulas().get(func._overloadpacket)
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=result))
    if func._schema.name == _CPU_ATTENTION:
        return _attention_flops(args[0], args[1], products=2, causal=len(args) > 4 and args[4])
    if func._schema.name == f"{_CPU_ATTENTION}_backward":
        return _attention_flops(args[1], args[2], products=5, causal=args[7])
    return None


def _attention_flops(query: Tensor, key: Tensor, products: int, causal: bool) -> int:
    """[batch, heads, tokens, head_dim]; a causal one skips half."""
    return products * 2 * math.prod(query.shape) * key.shape[-2] // (2 if causal else 1)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
