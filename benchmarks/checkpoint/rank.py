"""A rank that saves, in turns by each contender."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import Shard

import phalanx as px

__all__ = ["CONTENDERS", "TREES", "run_rank"]

_BLOCK = 1 << 20


def _small(_large_bytes: int) -> dict[str, torch.Tensor]:
    """The same on all ranks, as the parameters under DDP are."""
    return {f"layer.{number}": torch.full((256,), float(number)) for number in range(1000)}


def _large(large_bytes: int) -> dict[str, torch.Tensor]:
    """Each rank has some rows, as under FSDP."""
    rows = max(1, large_bytes // 4096)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "weights": distribute_tensor(torch.arange(rows * 1024, dtype=torch.float32).view(rows, 1024), mesh, [Shard(0)])
    }


TREES = {"1,000 small tensors": _small, "one large tensor": _large}


def _raw(path: Path, tree: dict[str, Any], world: px.Group) -> None:
    """One file per rank, of as many bytes as its share: written in blocks, then on the disk."""
    mine = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tree.values()]
    if len(mine) > 1:
        mine = mine[world.rank :: world.world_size]
    path.mkdir(exist_ok=True)
    with (path / f"rank-{world.rank}").open("wb", buffering=_BLOCK) as file:
        for tensor in mine:
            memory = memoryview(tensor.view(-1).numpy()).cast("B")
            for first in range(0, len(memory), _BLOCK):
                file.write(memory[first : first + _BLOCK])
        file.flush()
        os.fsync(file.fileno())


def _phalanx(path: Path, tree: dict[str, Any], world: px.Group) -> None:
    px.checkpoint.save(path, tree, world)


def _dcp(path: Path, tree: dict[str, Any], _world: px.Group) -> None:
    dcp.save(tree, checkpoint_id=path)


CONTENDERS: dict[str, Callable[[Path, dict[str, Any], px.Group], None]] = {
    "write and fsync": _raw,
    "px.checkpoint.save": _phalanx,
    "torch's DCP": _dcp,
}


def run_rank(folder: str, name: str, large_bytes: int, rounds: int) -> dict[str, list[float]]:
    """The seconds of each save, until the last rank was done."""
    torch.set_num_threads(1)
    dist.init_process_group("phalanx")
    world = px.init()
    tree = TREES[name](large_bytes)
    found: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
    for turn in range(rounds + 1):
        for number, (contender, save) in enumerate(CONTENDERS.items()):
            path = Path(folder) / f"{number}-{turn}"
            world.barrier()
            began = time.perf_counter()
            save(path, tree, world)
            world.barrier()
            if turn:  # the first one warms up
                found[contender].append(time.perf_counter() - began)
            if world.rank == 0:
                shutil.rmtree(path)
    dist.destroy_process_group()
    return found
