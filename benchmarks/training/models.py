"""The models that are trained: a small GPT, and one of many small layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

__all__ = ["MODELS", "TrainingSetup"]

_VOCABULARY, _WIDTH, _HEADS, _CONTEXT, _BLOCKS = 96, 128, 4, 64, 4
_FEATURES, _LAYERS = 64, 120


class TrainingSetup(NamedTuple):
    """A model, its optimizer, and the loss of a batch."""

    model: nn.Module
    optimizer: Callable[[Any], torch.optim.Optimizer]
    batch: tuple[torch.Tensor, torch.Tensor]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class _Block(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.look = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.join = nn.Linear(_WIDTH, _WIDTH)
        self.think = nn.Sequential(nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.look(self.before(x)).view(batch, length, 3, _HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.join(seen.transpose(1, 2).reshape(batch, length, _WIDTH))
        return x + self.think(self.between(x))


class _Gpt(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(_VOCABULARY, _WIDTH)
        self.places = nn.Parameter(torch.zeros(_CONTEXT, _WIDTH))
        self.blocks = nn.Sequential(*(_Block() for _ in range(_BLOCKS)))
        self.head = nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _VOCABULARY))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.words(words) + self.places))


def _gpt(rank: int) -> TrainingSetup:
    words = torch.randint(_VOCABULARY, (4, _CONTEXT + 1), generator=torch.Generator().manual_seed(rank))

    def loss(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())

    return TrainingSetup(
        _Gpt(), lambda parameters: torch.optim.AdamW(parameters, 3e-4), (words[:, :-1], words[:, 1:]), loss
    )


def _layers(rank: int) -> TrainingSetup:
    layers = [
        layer for _ in range(_LAYERS) for layer in (nn.Linear(_FEATURES, _FEATURES), nn.LayerNorm(_FEATURES), nn.ReLU())
    ]
    x = torch.randn((16, _FEATURES), generator=torch.Generator().manual_seed(rank))
    model = nn.Sequential(*layers)
    return TrainingSetup(model, lambda parameters: torch.optim.SGD(parameters, 1e-3), (x, x), functional.mse_loss)


MODELS: dict[str, Callable[[int], TrainingSetup]] = {"gpt": _gpt, "layers": _layers}
"""Name -> what makes it, with the data of a rank."""
