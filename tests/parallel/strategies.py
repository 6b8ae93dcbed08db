"""The GPT of the examples, trained in every way that Phalanx has, beside one process: are the losses the same?

    python -m tests.parallel.strategies [--steps 20] [--ranks 4]

Prints a table: the largest difference to the losses of one process, and which rows have the same bits: the same letter.
Exits with 1 if a difference is larger than 1e-5.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tests.parallel.gpt import Batch, data, in_parts, layers_of, loss_of, model_of

import phalanx as px
from phalanx.testing import run_ranks

__all__ = ["LIMIT", "STRATEGIES", "alone", "losses_of"]

LIMIT = 1e-5
LEARNING_RATE = 3e-3


def _data_parallel(wrap: Callable[[Any, px.Group], Any]) -> Callable[[px.Group, list[Batch]], list[float]]:
    """Each rank trains on its part of every batch."""

    def train(world: px.Group, batches: list[Batch]) -> list[float]:
        model = wrap(model_of(), world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        losses = []
        for letters, following in batches:
            x, y = (whole.tensor_split(world.world_size)[world.rank] for whole in (letters, following))
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(_mean(loss.detach(), world))
        return losses

    return train


def _pipeline(schedule: Any) -> Callable[[px.Group, list[Batch]], list[float]]:
    """Each rank has some layers. There are as many micro-batches as ranks."""

    def train(world: px.Group, batches: list[Batch]) -> list[float]:
        pipe = px.parallel.Pipeline(layers_of(model_of()), world, schedule=schedule, microbatches=world.world_size)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=LEARNING_RATE)
        losses = []
        for letters, following in batches:
            optimizer.zero_grad()
            losses.append(float(pipe.step(letters, following, loss_of)))
            optimizer.step()
        return losses

    return train


def _sharded_pipeline(world: px.Group, batches: list[Batch]) -> list[float]:
    """Two pipelines, each on half of every batch; the ranks with the same layers share their parameters."""
    with px.Mesh(world, {"stage": -1, "shard": 2}) as mesh:
        pipe = px.parallel.Pipeline(
            layers_of(model_of()),
            mesh["stage"],
            microbatches=world.world_size // 2,
            wrap=lambda stage: px.parallel.FSDP(stage, mesh["shard"]),
        )
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=LEARNING_RATE)
        losses = []
        for letters, following in batches:
            x, y = (whole.tensor_split(2)[mesh.coordinate["shard"]] for whole in (letters, following))
            optimizer.zero_grad()
            loss = pipe.step(x, y, loss_of)
            optimizer.step()
            losses.append(_mean(loss, mesh["shard"]))
        return losses


def _hybrid(model: Any, world: px.Group) -> Any:
    return px.parallel.FSDP(model, px.Mesh(world, {"replica": 2, "shard": -1}), strategy="hybrid")


STRATEGIES: dict[str, Callable[[px.Group, list[Batch]], list[float]]] = {
    "DDP": _data_parallel(px.parallel.DDP),
    "FSDP, full": _data_parallel(px.parallel.FSDP),
    "FSDP, grads": _data_parallel(lambda model, world: px.parallel.FSDP(model, world, strategy="grads")),
    "FSDP, hybrid (2 replicas)": _data_parallel(_hybrid),
    "Pipeline, gpipe": _pipeline("gpipe"),
    "Pipeline, 1f1b": _pipeline("1f1b"),
    "Pipeline, interleaved": _pipeline("interleaved"),
    "FSDP x Pipeline, 1f1b (2 shards)": _sharded_pipeline,
}


def _mean(loss: torch.Tensor, group: px.Group) -> float:
    """Added up as one process does that takes the parts one after the other."""
    total = torch.zeros(())
    for each in group.all_gather(loss.reshape(1)):
        total = total + each * (1 / group.world_size)
    return float(total)


def losses_of(world: px.Group, names: list[str], steps: int) -> dict[str, list[float]]:
    """On a rank: the losses of each strategy."""
    torch.set_num_threads(1)
    batches = data(steps)
    return {name: STRATEGIES[name](world, batches) for name in names}


def alone(parts: int, steps: int) -> list[float]:
    """The losses of one process, with as many threads as a rank has."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return in_parts(model_of(), data(steps), parts)
    finally:
        torch.set_num_threads(before)


def main() -> int:
    """Runs all of it; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4, help="an even number")
    options = parser.parse_args()
    expected = alone(1, options.steps)
    found = {"one process": expected, f"one process, in {options.ranks} parts": alone(options.ranks, options.steps)}
    everyone = run_ranks(
        options.ranks, losses_of, list(STRATEGIES), options.steps, backend="mesh", timeout=100 + 30 * options.steps
    )
    good = all(of_rank == everyone[0] for of_rank in everyone)
    found.update(everyone[0])

    table = Table("", "first loss", "last loss", "largest difference", "bits", box=None)
    letters: dict[tuple[float, ...], str] = {}
    for name, losses in found.items():
        difference = max(abs(one - other) for one, other in zip(losses, expected, strict=True))
        good = good and difference <= LIMIT
        letter = letters.setdefault(tuple(losses), chr(ord("a") + len(letters)))
        table.add_row(name, f"{losses[0]:.7f}", f"{losses[-1]:.7f}", f"{difference:.1e}", letter)
    console = Console(width=100)
    console.print(f"{options.ranks} ranks, {options.steps} steps; rows with the same letter have the same bits")
    console.print(table)
    console.print(f"[green]within {LIMIT}, and the same on all ranks" if good else "[red]not as in one process")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
