"""A rank that trains: its library's data-parallel wrapper, around a model of `models`."""

from __future__ import annotations

import datetime as dt
from typing import Any

import torch
import torch.distributed as dist

import phalanx as px
from phalanx.cli.bench.library import Call
from phalanx.cli.bench.operations import Arrays

from .models import MODELS
from .operations import ALONE

__all__ = ["open_world"]


class _Trainer:
    """The common part of both kinds of trainers."""

    rank: int
    size: int
    version: str
    barrier: Call
    close: Call

    def wrap(self, model: Any, alone: bool) -> Any:
        """The model for data-parallel training, with all ranks or with none but this one."""
        raise NotImplementedError

    def call(self, operation: str, arrays: Arrays) -> Call:
        """One step. It leaves the loss in the array."""
        alone = operation.endswith(ALONE)
        torch.manual_seed(0)
        setup = MODELS[operation.removesuffix(ALONE)](self.rank)
        model = self.wrap(setup.model, alone)
        optimizer = setup.optimizer(model.parameters())
        x, y = setup.batch

        def step() -> None:
            optimizer.zero_grad()
            loss = setup.loss(model(x), y)
            loss.backward()
            optimizer.step()
            arrays.x[0] = loss.item()

        return step


class _OfTorch(_Trainer):
    def __init__(self, timeout: float, backend: str) -> None:
        dist.init_process_group(backend, timeout=dt.timedelta(seconds=timeout))
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.version = f"torch {torch.__version__}"
        self.barrier, self.close = dist.barrier, dist.destroy_process_group

        self._alone = [dist.new_group([rank]) for rank in range(self.size)][self.rank]

    def wrap(self, model: Any, alone: bool) -> Any:
        return torch.nn.parallel.DistributedDataParallel(model, process_group=self._alone if alone else None)


class _OfPhalanx(_Trainer):
    def __init__(self, timeout: float) -> None:
        self._world = px.init(timeout=timeout)
        self.rank, self.size = self._world.rank, self._world.world_size
        self.version = px.__version__
        self.barrier, self.close = self._world.barrier, self._world.close

        self._alone = self._world.subgroup([self.rank])

    def wrap(self, model: Any, alone: bool) -> Any:
        return px.parallel.DDP(model, self._alone if alone else self._world)


def open_world(timeout: float, backend: str = "") -> _Trainer:
    """Joins by the variables of this process; with torch's DDP on its backend of this name, or with Phalanx's own."""
    torch.set_num_threads(1)
    return _OfTorch(timeout, backend) if backend else _OfPhalanx(timeout)
