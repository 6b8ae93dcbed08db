"""A small net with what is hard to shard: tied weights, a scalar, odd shapes, a frozen and an unused parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import phalanx as px

__all__ = ["WORDS", "Net", "batch", "fresh", "loss_of", "train", "wrapped"]

WORDS = 11


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 6)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)) for _ in range(3))
        self.head = nn.Linear(6, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(5))
        self.register_buffer("count", torch.zeros(2))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found = self.embedding(words)
        for layer in self.layers:
            found = found + layer(found) * self.frozen.sum()
        return self.head(found) * self.scale


def fresh(seed: int = 0) -> Net:
    made = Net()
    # Ranks may be threads, which have torch's own random numbers in common.
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in made.named_parameters():
        if name not in ("scale", "frozen", "unused"):
            nn.init.normal_(parameter, std=0.4, generator=generator)
    return made


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (12, 5), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(words).float().reshape(-1, WORDS), words.reshape(-1))


def wrapped(world: px.Group, strategy: str, model: nn.Module, **options: Any) -> Any:
    if strategy == "ddp":
        return px.parallel.DDP(model, world, find_unused_parameters=True)
    if strategy == "mesh":
        mesh = px.Mesh(world, {"replica": 2, "shard": -1})
        return px.parallel.FSDP(model, mesh, strategy="hybrid", **options)
    return px.parallel.FSDP(model, world, strategy=strategy, **options)


def train(
    world: px.Group | None,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    *,
    steps: int = 5,
    clip: float | None = None,
    optimizer: Any = torch.optim.AdamW,
) -> list[float]:
    """The losses of some steps; of all ranks, the mean."""
    model = wrap(fresh())
    made = optimizer([each for each in model.parameters() if each.requires_grad], lr=0.05)
    losses = []
    for step in range(steps):
        words = batch(step)
        if world is not None:
            words = words.chunk(world.world_size)[world.rank]
        loss = loss_of(model, words)
        made.zero_grad()
        loss.backward()
        if clip is not None and hasattr(model, "clip_grad_norm_"):
            model.clip_grad_norm_(clip)
        elif clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        made.step()
        found = loss.detach().double().reshape(1)
        losses.append((found if world is None else world.all_reduce(found, op="mean")).item())
    return losses
