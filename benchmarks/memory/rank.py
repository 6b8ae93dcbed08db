"""A rank that trains, and looks at its memory."""

from __future__ import annotations

import gc
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import phalanx as px

from .model import GPT, SIZES, loss_of

__all__ = ["CONTENDERS", "Figures", "run_rank"]


class Figures(NamedTuple):
    """What a rank has found."""

    steps: list[float]
    """Seconds."""
    between: int
    """Bytes between two steps."""
    peak: int
    """The most bytes that were seen in a step."""
    losses: list[float]


def _ddp(model: Any, _world: px.Group) -> Any:
    return DistributedDataParallel(model)


def _fsdp2(model: Any, _world: px.Group) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


CONTENDERS: dict[str, tuple[str, Callable[[Any, px.Group], Any]]] = {
    "Phalanx's FSDP": ("", px.parallel.FSDP),
    "Phalanx's DDP": ("", px.parallel.DDP),
    "torch's DDP on Phalanx": ("phalanx", _ddp),
    "torch's FSDP2 on Phalanx": ("phalanx", _fsdp2),
    "torch's FSDP2 on Gloo": ("gloo", _fsdp2),
}
"""The backend of torch that each needs, and what wraps the model."""


def run_rank(store: str, name: str, size: str, tokens: int, steps: int) -> Figures:
    """Trains for some steps by the clock, then for two in which memory is looked at."""
    torch.set_num_threads(1)
    backend, wrap = CONTENDERS[name]
    world = px.init()
    if backend:
        where = {"init_method": f"file://{store}", "rank": world.rank, "world_size": world.world_size}
        dist.init_process_group(backend, **(where if backend == "gloo" else {}))
    torch.manual_seed(0)
    model = wrap(GPT(*SIZES[size]), world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    random = torch.Generator().manual_seed(world.rank)
    losses = []

    def step() -> None:
        words = torch.randint(0, SIZES[size][3], (1, tokens + 1), generator=random)
        optimizer.zero_grad()
        loss = loss_of(model, words)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))

    step()
    gc.collect()
    seconds = []
    for _ in range(steps):
        world.barrier()
        began = time.perf_counter()
        step()
        world.barrier()
        seconds.append(time.perf_counter() - began)
    watch = _Watch()
    watch.start()
    for _ in range(2):
        step()
    watch.stop()
    world.barrier()
    between = memory()
    world.barrier()
    if backend:
        dist.destroy_process_group()
    return Figures(seconds, between, max(watch.most, between), losses)


def memory() -> int:
    """This process's share of the memory that it uses."""
    found = re.search(r"^Pss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


class _Watch:
    """Looks at the memory again and again, beside the program."""

    def __init__(self) -> None:
        self.most = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop.wait(0.01):
            self.most = max(self.most, memory())

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
