"""Where a micro-batch enters a stage: the begin of its graph, which catches the gradients for the stage before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["Entrance", "enter"]


class Entrance:
    """A tensor that came from the stage before, and its gradient once backward has been here."""

    __slots__ = ("gradient", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.gradient: torch.Tensor | None = None


def enter(
    tensors: Sequence[torch.Tensor | None], wants: Sequence[bool]
) -> tuple[tuple[torch.Tensor | None, ...], list[Entrance | None]]:
    """The tensors for a stage to work on, and an entry for each whose gradient is wanted.

    They are no leaves of the graph, which could not be changed in place: in one process they would not be, either.
    """
    entered: list[torch.Tensor | None] = []
    entries: list[Entrance | None] = []
    for tensor, wanted in zip(tensors, wants, strict=True):
        entry = Entrance(tensor) if wanted and tensor is not None else None
        entries.append(entry)
        entered.append(tensor if entry is None else _Enter.apply(torch.empty(0, requires_grad=True), entry))
    return tuple(entered), entries


class _Enter(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, _anchor: torch.Tensor, entry: Entrance) -> torch.Tensor:
        # A view may not be changed in place. It would be one as an argument that is returned, or as it was received.
        ctx.entry = entry
        tensor, entry.tensor = entry.tensor, None
        assert tensor is not None
        return tensor.data

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        ctx.entry.gradient = gradient
        return None, None
