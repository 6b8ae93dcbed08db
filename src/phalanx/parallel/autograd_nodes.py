"""Nodes of autograd's graph, those that add to gradients and those that made a module's output; and its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn

__all__ = ["EndOfBackward", "accumulator_of", "nodes_of"]


def accumulator_of(parameter: nn.Parameter) -> Any:
    """The node of autograd that adds to a parameter's gradient."""
    required = parameter.requires_grad
    parameter.requires_grad_(True)  # one that is frozen just now has none that can be reached
    with torch.enable_grad():
        node = parameter.view_as(parameter).grad_fn.next_functions[0][0]
    parameter.requires_grad_(required)
    return node


def nodes_of(value: Any, seen: set[int]) -> Iterator[Any]:
    """The nodes of autograd that made the tensors in a module's output, whatever it is made of."""
    if isinstance(value, torch.Tensor):
        if value.grad_fn is not None:
            yield value.grad_fn
        return
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, nn.Module)) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        parts: Any = value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = value
    else:
        parts = getattr(value, "__dict__", {}).values()
    for part in list(parts):
        yield from nodes_of(part, seen)


class BackwardAverages(Protocol):
    """The averages of one backward."""

    def finish(self) -> None:
        """The backward is over."""

    def give_up(self) -> None:
        """The backward has raised."""


class EndOfBackward:
    """A callback that autograd calls at the end of a backward, or drops if that raises. Autograd alone holds it."""

    __slots__ = ("_pass",)

    def __init__(self, current: BackwardAverages) -> None:
        self._pass: BackwardAverages | None = current

    def __call__(self) -> None:
        current, self._pass = self._pass, None
        if current is not None:
            current.finish()

    def __del__(self) -> None:
        if self._pass is not None:
            self._pass.give_up()
