"""A GPT of any size, in the shape of GPT-2: the first and the last layer share their weights."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

__all__ = ["GPT", "SIZES", "loss_of"]

SIZES = {"124M": (12, 12, 768, 50257, 1024), "tiny": (2, 2, 32, 97, 64)}
"""Layers, heads, width, words, and the longest text."""


class Block(nn.Module):  # type: ignore[misc]
    """Attention, then two linear layers."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleDict({"look": nn.LayerNorm(width), "think": nn.LayerNorm(width)})
        self.look, self.seen = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.look(self.norms["look"](x)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.seen(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(nn.functional.gelu(self.wide(self.norms["think"](x))))


class GPT(nn.Module):  # type: ignore[misc]
    """Says how likely each word is to come next."""

    def __init__(self, layers: int, heads: int, width: int, words: int, longest: int) -> None:
        super().__init__()
        self.word, self.place = nn.Embedding(words, width), nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(heads, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.guess = nn.Linear(width, words, bias=False)
        self.guess.weight = self.word.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.word(words) + self.place(torch.arange(words.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.guess(self.norm(x))


def loss_of(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    """The loss of texts."""
    return cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
