"""`torch.compile` of functions with collectives, of data parallel and of FSDP2.

By "aot_eager": all of the compiler but the making of machine code. One small function goes through inductor, if there
is a compiler for C++; to import it alone takes seconds.
"""

from __future__ import annotations

import shutil
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

from .common import Part, digest, mlp, parameters, train


def _collectives(tensor: torch.Tensor) -> torch.Tensor:
    world = dist.group.WORLD
    total = functional.all_reduce(tensor * 2, "sum", world)
    everyone = functional.all_gather_tensor(total, 0, world)
    return functional.reduce_scatter_tensor(everyone, "sum", 0, world) + 1


def _in_place(tensor: torch.Tensor) -> torch.Tensor:
    """torch.distributed's own calls are made functional by the compiler."""
    tensor = tensor * 2
    dist.all_reduce(tensor)
    out = torch.empty(tensor.numel() * dist.get_world_size())
    dist.all_gather_into_tensor(out, tensor)
    return out + 1


def _run(function: Any, backend: str) -> Any:
    torch._dynamo.reset()
    x = torch.arange(4.0) + dist.get_rank()
    found = torch.compile(function, backend=backend, fullgraph=True)(x)
    assert torch.equal(found, function(x))
    return digest([found])


def functions() -> Any:
    return [_run(_collectives, "aot_eager"), _run(_in_place, "aot_eager")]


def by_inductor() -> Any:
    """It calls operators that write into memory that it has planned."""
    return _run(_collectives, "inductor" if shutil.which("g++") else "aot_eager")


def data_parallel() -> Any:
    torch._dynamo.reset()
    module = torch.compile(nn.parallel.DistributedDataParallel(mlp()), backend="aot_eager")
    return [train(module), parameters(module)]


PARTS: list[Part] = [functions, by_inductor, data_parallel]
