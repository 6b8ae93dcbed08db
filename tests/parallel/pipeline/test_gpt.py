"""The GPT of the examples in a pipeline of four ranks, beside one process."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import phalanx as px
from phalanx.testing import run_ranks

STEPS, MICROBATCHES = 20, 8
CONTEXT, COUNT = 32, 16


def example() -> Any:
    """What `examples/train_gpt.py` defines; its last line would run it."""
    path = Path(__file__).parents[3] / "examples" / "train_gpt.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.unparse(tree.body[-1]) == "main()"
    names: dict[str, Any] = {"__file__": str(path)}
    exec(compile(ast.Module(tree.body[:-1], []), str(path), "exec"), names)
    return SimpleNamespace(**names)


class Begin(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.letter, self.place = model.letter, model.place

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        return self.letter(letters) + self.place(torch.arange(letters.shape[1]))


class End(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.norm, self.guess = model.norm, model.guess

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.guess(self.norm(x).flatten(0, 1))


def loss_of(guesses: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    return cross_entropy(guesses, following.flatten())


def batches(gpt: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    text = torch.tensor([gpt.LETTERS.index(letter) for letter in gpt.TEXT])
    made = gpt.batches(text, CONTEXT, COUNT, seed=0)
    return [next(made) for _ in range(STEPS)]


def alone(model: nn.Module, data: list[tuple[torch.Tensor, torch.Tensor]], microbatches: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for letters, following in data:
        optimizer.zero_grad()
        total = torch.zeros(())
        for x, y in zip(letters.tensor_split(microbatches), following.tensor_split(microbatches), strict=True):
            loss = loss_of(model(x), y) * (1 / microbatches)
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        losses.append(float(total))
    return losses


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Ranks are threads: torch's own would only be in their way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("one_thread")
def test_losses_of_one_process_and_of_each_schedule() -> None:
    gpt = example()
    torch.manual_seed(0)
    model = gpt.GPT(6, 2, 32, CONTEXT)
    data = batches(gpt)
    whole = alone(copy.deepcopy(model), data, 1)
    parts = alone(copy.deepcopy(model), data, MICROBATCHES)
    assert whole == pytest.approx(parts, abs=1e-5)

    def body(world: px.Group, schedule: str) -> list[float]:
        mine = copy.deepcopy(model)
        layers = nn.Sequential(Begin(mine), *mine.blocks, End(mine))
        pipe = px.parallel.Pipeline(layers, world, schedule=schedule, microbatches=MICROBATCHES)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
        losses = []
        for letters, following in data:
            optimizer.zero_grad()
            losses.append(float(pipe.step(letters, following, loss_of)))
            optimizer.step()
        return losses

    for schedule in ("gpipe", "1f1b", "interleaved"):
        for losses in run_ranks(4, body, schedule, timeout=200):
            assert losses == parts, schedule
