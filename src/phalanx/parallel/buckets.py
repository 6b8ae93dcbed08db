"""Gradients in a few long runs of memory: each parameter's gradient is a view, so that nothing is copied.

A bucket holds parameters of one dtype, in the reverse of their order in the model: roughly the order in which backward
finishes them. Where the group has a segment, buckets lie in it, and the ranks reduce them where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..errors import PhalanxError
from ..group import Group, Work

__all__ = ["Bucket", "make_buckets"]

ALIGN = 64
"""Bytes: every gradient begins on a cache line."""


class Bucket:
    """Some parameters, and one tensor that holds all of their gradients."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], group: Group) -> None:
        self.parameters = list(parameters)
        dtype = self.parameters[0].dtype
        item = self.parameters[0].element_size()
        step = max(1, ALIGN // item)
        starts, length = [], 0
        for parameter in self.parameters:
            starts.append(length)
            length += -(-parameter.numel() // step) * step
        self.flat = _memory(group, length * item).view(dtype)
        self.views = [
            self.flat[start : start + parameter.numel()].view_as(parameter)
            for start, parameter in zip(starts, self.parameters, strict=True)
        ]
        self.missing: set[int] = set()
        """Places of parameters whose gradients are not ready in this pass."""
        self.work: Work | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return int(self.flat.numel() * self.flat.element_size())

    def begin(self) -> None:
        """A pass begins: all gradients are awaited, and those that were set to None are zero again."""
        self.missing = set(range(len(self.parameters)))
        self.work = None
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:
                view.zero_()
                parameter.grad = view

    def ready(self, place: int) -> bool:
        """A gradient is complete; True if all are."""
        parameter, view = self.parameters[place], self.views[place]
        grad = parameter.grad
        if grad is None:
            view.zero_()
        elif grad.data_ptr() != view.data_ptr() or grad.shape != view.shape:
            # Somebody set a gradient of its own.
            view.copy_(grad)
        parameter.grad = view
        self.missing.discard(place)
        return not self.missing


def _memory(group: Group, nbytes: int) -> torch.Tensor:
    """Bytes for a bucket: in the group's segment, if it has one with so much room."""
    try:
        memory: Any = group.empty((nbytes,), np.uint8)
    except PhalanxError:
        memory = np.empty(nbytes, np.uint8)
    flat = torch.from_numpy(memory)
    flat.zero_()
    return flat


def make_buckets(parameters: Sequence[torch.nn.Parameter], group: Group, bucket_bytes: int) -> list[Bucket]:
    """Cuts parameters into buckets; the last parameters of the model come first."""
    by_dtype: dict[torch.dtype, list[list[torch.nn.Parameter]]] = {}
    order: list[list[torch.nn.Parameter]] = []
    room: dict[torch.dtype, int] = {}
    for parameter in reversed(parameters):
        runs = by_dtype.setdefault(parameter.dtype, [])
        size = parameter.numel() * parameter.element_size()
        if not runs or room[parameter.dtype] < size:
            runs.append([])
            order.append(runs[-1])
            room[parameter.dtype] = bucket_bytes
        runs[-1].append(parameter)
        room[parameter.dtype] -= size
    return [Bucket(run, group) for run in order]
