"""A model, its training, and what is told of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["Part", "digest", "mlp", "parameters", "train"]

Part = Callable[[], Any]
STEPS = 4


def mlp(width: int = 32) -> nn.Sequential:
    """The same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4))


def train(module: Any, *, seed: int | None = None, optimizer: Any = None, steps: int = STEPS) -> list[float]:
    """Some steps, each rank on data of its own unless there is a seed; the losses."""
    random = torch.Generator().manual_seed(10 + dist.get_rank() if seed is None else seed)
    optimizer = optimizer or torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = module(torch.randn(8, 16, generator=random)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """All bits of them."""
    found = hashlib.sha256()
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        found.update(f"{local.dtype} {tuple(local.shape)}".encode())
        found.update(local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return f"sha256 {found.hexdigest()[:16]}"


def parameters(module: nn.Module) -> str:
    """All bits of the parameters and buffers that this rank has."""
    return digest([*module.parameters(), *module.buffers()])
