"""Two ranks under every layout: over NCCL if each has a GPU of its own, else on one GPU by way of the host."""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from device import engine
from device.part import Checks, Figures
from device.streams import slow
from dsx.testing.models import Tangle

WORLD = 2


def checks(device: str, argument: str | None) -> Checks:
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    way = "NCCL" if gpus >= WORLD else "the host"
    for layout in [argument] if argument else engine.LAYOUTS:
        for dtype in engine.LIMITS:
            words = f"{layout}, {engine.name_of(dtype)}, over {way}"
            yield words, partial(_is_plain, layout, dtype, device, way == "NCCL")
        if device == "cuda":
            words = f"{layout}, slow sides, over {way}"
            yield words, partial(_is_plain, layout, torch.float32, device, way == "NCCL", slowly=True)


def _is_plain(layout: str, dtype: torch.dtype, device: str, nccl: bool, slowly: bool = False) -> Figures:
    found = _run(layout, dtype, device, nccl, slowly)
    for losses, weights in found:
        assert losses == found[0][0], "the ranks report other losses"
        assert all(torch.equal(weights[name], tensor) for name, tensor in found[0][1].items()), "other bits on a rank"
    data = _data(dtype, device)
    return engine.assert_plain(found[0], lambda: _make(dtype, device), data, dtype, world=WORLD)


def _make(dtype: torch.dtype, device: str) -> nn.Module:
    return (Tangle() if dtype == torch.float64 else engine.small_gpt()).to(device, dtype)


def _data(dtype: torch.dtype, device: str) -> Any:
    return (engine.tokens_on if dtype == torch.float64 else engine.ids_on)(device)


def _run(
    layout: str, dtype: torch.dtype, device: str, nccl: bool, slowly: bool
) -> list[tuple[list[float], dict[str, Tensor]]]:
    """What each rank found; tensors come back in files, on the CPU."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as free, tempfile.TemporaryDirectory(prefix="dsx_device_") as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        arguments = [(rank, port, folder, layout, dtype, device, nccl, slowly) for rank in range(WORLD)]
        processes = [context.Process(target=_rank, args=each) for each in arguments]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
            process.kill()
            process.join()
        codes = [process.exitcode for process in processes]
        assert codes == [0] * WORLD, f"ranks ended with {codes}; the log has what they printed"
        found = [torch.load(Path(folder, str(rank))) for rank in range(WORLD)]
    return [(losses, {name: tensor.to(device) for name, tensor in weights.items()}) for losses, weights in found]


def _rank(
    rank: int, port: int, folder: str, layout: str, dtype: torch.dtype, device: str, nccl: bool, slowly: bool
) -> None:
    local = rank if nccl else 0
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "LOCAL_RANK": str(local)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    from device.hosted import HostedPlugin

    place = f"cuda:{local}" if device == "cuda" else device
    if device == "cuda":
        torch.cuda.set_device(local)
    hosted: dict[str, Any] = {} if nccl else {"communicate": {"use": ["hosted"]}}
    wanted = engine.manifest(layout, **hosted)
    plugins = {"plugins": {"hosted": HostedPlugin()}}
    with slow() if slowly else nullcontext():
        losses, weights = engine.train(_make(dtype, place), _data(dtype, place), wanted, rank, **plugins)
    torch.save((losses, {name: tensor.cpu() for name, tensor in weights.items()}), Path(folder, str(rank)))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
