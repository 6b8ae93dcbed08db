"""Models that are cut between their layers: one stage, or two, on each rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    SplitPoint,
    pipeline,
)

from .common import Part, parameters

CPU = torch.device("cpu")
PIECES = 4


def _stages(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(count)]


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def _steps(schedule: Any, modules: list[nn.Module]) -> Any:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    random = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)
    told: list[float] = []
    for _ in range(3):
        x, target = torch.randn(8, 16, generator=random), torch.randn(8, 16, generator=random)
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        schedule.step(
            *([x] if rank == 0 else []),
            **({"target": target, "losses": losses} if rank == ranks - 1 else {}),
        )
        optimizer.step()
        told += [float(loss) for loss in losses]
    return [told, [parameters(module) for module in modules]]


def _one_stage(schedule: type) -> Any:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    module = _stages(ranks)[rank]
    stage = PipelineStage(module, rank, ranks, CPU)
    return _steps(schedule(stage, n_microbatches=PIECES, loss_fn=_loss), [module])


def _two_stages(schedule: type) -> Any:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    modules = _stages(2 * ranks)[rank::ranks]
    stages = [PipelineStage(module, rank + ranks * i, 2 * ranks, CPU) for i, module in enumerate(modules)]
    return _steps(schedule(stages, n_microbatches=PIECES, loss_fn=_loss), modules)


def gpipe() -> Any:
    return _one_stage(ScheduleGPipe)


def one_forward_one_backward() -> Any:
    return _one_stage(Schedule1F1B)


def interleaved() -> Any:
    return _two_stages(ScheduleInterleaved1F1B)


def zero_bubble() -> Any:
    return _two_stages(ScheduleInterleavedZeroBubble)


def traced() -> Any:
    """torch cuts the model itself."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = nn.Sequential(*_stages(ranks))
    spec = {str(index): SplitPoint.BEGINNING for index in range(1, ranks)}
    pipe = pipeline(model, mb_args=(torch.randn(8 // PIECES, 16),), split_spec=spec)
    stage = pipe.build_stage(rank, CPU)
    return _steps(ScheduleGPipe(stage, n_microbatches=PIECES, loss_fn=_loss), [stage.submod])


PARTS: list[Part] = [gpipe, one_forward_one_backward, interleaved, zero_bubble, traced]
