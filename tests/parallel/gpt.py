"""The GPT of the examples for tests: its data, its loss, and its parts as stages of a pipeline."""

from __future__ import annotations

import ast
import copy
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

__all__ = ["CONTEXT", "Batch", "data", "in_parts", "layers_of", "loss_of", "model_of"]

CONTEXT, TEXTS = 32, 16
"""Letters of a text, and texts of a batch."""
Batch = tuple[torch.Tensor, torch.Tensor]


@functools.cache
def _example() -> Any:
    """What `examples/train_gpt.py` defines; its last line would run it."""
    path = Path(__file__).parents[2] / "examples" / "train_gpt.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.unparse(tree.body[-1]) == "main()"
    names: dict[str, Any] = {"__file__": str(path)}
    exec(compile(ast.Module(tree.body[:-1], []), str(path), "exec"), names)
    return SimpleNamespace(**names)


def model_of(layers: int = 6) -> Any:
    """The model, always with the same values."""
    return copy.deepcopy(_made(layers))


@functools.cache
def _made(layers: int) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return _example().GPT(layers, 2, 32, CONTEXT)


def data(steps: int) -> list[Batch]:
    """The batches of some steps."""
    gpt = _example()
    text = torch.tensor([gpt.LETTERS.index(letter) for letter in gpt.TEXT])
    made = gpt.batches(text, CONTEXT, TEXTS, seed=0)
    return [next(made) for _ in range(steps)]


def loss_of(guesses: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """The loss of a batch."""
    return cross_entropy(guesses, following.flatten())


def layers_of(model: Any) -> nn.Sequential:
    """The same model as layers one after the other."""
    return nn.Sequential(_Begin(model), *model.blocks, _End(model))


class _Begin(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.letter, self.place = model.letter, model.place

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        return self.letter(letters) + self.place(torch.arange(letters.shape[1]))


class _End(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.norm, self.guess = model.norm, model.guess

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.guess(self.norm(x).flatten(0, 1))


def in_parts(model: nn.Module, batches: list[Batch], parts: int) -> list[float]:
    """The losses of one process that takes each batch in parts, one after the other, and adds up their gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for letters, following in batches:
        optimizer.zero_grad()
        total = torch.zeros(())
        for x, y in zip(letters.tensor_split(parts), following.tensor_split(parts), strict=True):
            loss = loss_of(model(x), y) * (1 / parts)
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        losses.append(float(total))
    return losses
