"""A rank of a pipeline whose stages take a known time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import phalanx as px

__all__ = ["SCHEDULES", "run_rank"]

SCHEDULES: dict[str, tuple[int, Any]] = {
    "gpipe": (1, ScheduleGPipe),
    "1f1b": (1, Schedule1F1B),
    "interleaved": (2, ScheduleInterleaved1F1B),
}
"""Stages per rank, and torch's name."""
WIDTH = 256


class _Pace:
    """The time that this rank's stages take, and have taken."""

    def __init__(self) -> None:
        self.spent = 0.0

    @contextlib.contextmanager
    def lasting(self, seconds: float) -> Iterator[None]:
        """Leaves after this time: the arithmetic is a part of it, the rest is waited for."""
        began = time.perf_counter()
        yield
        time.sleep(max(0.0, began + seconds - time.perf_counter()))
        self.spent += time.perf_counter() - began


PACE = _Pace()


class _Busy(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        with PACE.lasting(seconds):
            return x + weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        with PACE.lasting(2 * ctx.seconds):
            return gradient, gradient.sum(0), None


class _Stage(nn.Module):  # type: ignore[misc]
    """Takes some time for a forward, and twice as long for a backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Busy.apply(x, self.weight, self.seconds)


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def _of_phalanx(world: px.Group, name: str, microbatches: int, stages: list[Any]) -> Callable[[Any, Any], Any]:
    pipe = px.parallel.Pipeline(stages, world, schedule=name, microbatches=microbatches)  # type: ignore[arg-type]
    return lambda x, y: pipe.step(x, y, _loss)


def _of_torch(world: px.Group, name: str, microbatches: int, stages: list[Any]) -> Callable[[Any, Any], Any]:
    made = [
        PipelineStage(stage, index, len(stages), torch.device("cpu"))
        for index, stage in enumerate(stages)
        if stage is not None
    ]
    kind = SCHEDULES[name][1]
    schedule = kind(made if len(made) > 1 else made[0], n_microbatches=microbatches, loss_fn=_loss)
    first, last = world.rank == 0, world.rank == world.world_size - 1

    def step(x: Any, y: Any) -> Any:
        return schedule.step(*([x] if first else []), **({"target": y, "losses": []} if last else {}))

    return step


def run_rank(milliseconds: float, microbatches: int, steps: int) -> dict[str, list[tuple[float, float]]]:
    """By schedule, of Phalanx and of torch, for each step: seconds until the last rank was done, and how many of them
    this rank's stages took.
    """
    torch.set_num_threads(1)
    dist.init_process_group("phalanx")
    world = px.init()
    x, y = torch.randn(2, 4 * microbatches, WIDTH)
    made: dict[str, Callable[[Any, Any], Any]] = {}
    for name, (per_rank, _) in SCHEDULES.items():
        for maker in (_of_phalanx, _of_torch):
            seconds = milliseconds / 1000 / per_rank
            stages = [
                _Stage(seconds) if index % world.world_size == world.rank else None
                for index in range(per_rank * world.world_size)
            ]
            made[f"{name}{maker.__name__}"] = maker(world, name, microbatches, stages)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
    for turn in range(steps + 1):
        for name, step in made.items():
            world.barrier()
            PACE.spent = 0.0
            began = time.perf_counter()
            step(x, y)
            world.barrier()
            if turn:  # the first one learns the shapes
                found[name].append((time.perf_counter() - began, PACE.spent))
    dist.destroy_process_group()
    return found
