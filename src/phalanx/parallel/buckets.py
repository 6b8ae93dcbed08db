"""Buckets: gradients travel together in a few long runs of memory.

A bucket holds parameters of one dtype and device, in the reverse of their order in the model: roughly the order in
which backward finishes them. Its memory is never a gradient itself, so nothing that the program does to gradients can
disturb an operation under way. Where the group has a segment, buckets of the CPU lie in it, and the ranks reduce them
where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..errors import PhalanxError
from ..group import Group, Work
from ..types import Op

__all__ = ["Bucket", "make_buckets"]

ALIGN = 64
"""Bytes: every gradient begins on a cache line."""


class Bucket:
    """Some parameters, and one tensor with room for all of their gradients."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], group: Group, first: int) -> None:
        self.parameters = list(parameters)
        self.first = first
        """The place of the first of them among all parameters in buckets."""
        self._group = group
        dtype = self.parameters[0].dtype
        item = self.parameters[0].element_size()
        step = max(1, ALIGN // item)
        starts, length = [], 0
        for parameter in self.parameters:
            starts.append(length)
            length += max(1, -(-parameter.numel() // step)) * step
        device = self.parameters[0].device
        if device.type == "cpu":
            self._flat = _memory(group, length * item).view(dtype)
        else:
            self._flat = torch.zeros(length, dtype=dtype, device=device)
        self._views = [
            self._flat[start : start + parameter.numel()].view(parameter.shape)
            for start, parameter in zip(starts, self.parameters, strict=True)
        ]
        # The sum of large values of float16 overflows where their mean does not: they are divided before.
        self._share = 1 / group.world_size if dtype == torch.float16 else None
        self._op: Op = "mean" if self._share is None else "sum"

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return int(self._flat.numel() * self._flat.element_size())

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def fill(self, taking_part: Sequence[bool]) -> list[torch.nn.Parameter]:
        """Copies the gradients in; zeros for those that are None and for parameters that do not take part.

        Returns:
            Parameters whose gradients have no dense memory. Zeros stand for them.
        """
        grads, views, strange = [], [], []
        for parameter, view, takes_part in zip(self.parameters, self._views, taking_part, strict=True):
            grad = parameter.grad if takes_part else None
            if grad is not None and grad.layout != torch.strided:
                strange.append(parameter)
                grad = None
            if grad is None:
                view.zero_()
            else:
                grads.append(grad)
                views.append(view)
        if grads:
            torch._foreach_copy_(views, grads)
        if self._share is not None:
            self._flat.mul_(self._share)
        return strange

    def clear(self) -> None:
        """Makes all gradients zero."""
        self._flat.zero_()

    def average(self, *, timeout: float | None) -> None:
        """Replaces the gradients by their mean over all ranks."""
        self._group.all_reduce(self._flat, op=self._op, timeout=timeout)

    def average_later(self, *, timeout: float | None) -> Work[Any]:
        """As `average`, without waiting for the others."""
        work: Work[Any] = self._group.all_reduce(self._flat, op=self._op, timeout=timeout, async_op=True)
        return work

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def give_out(self, wanted: Sequence[bool]) -> None:
        """Copies the gradients of those parameters back to where the program looks for them."""
        grads, views = [], []
        for parameter, view, is_wanted in zip(self.parameters, self._views, wanted, strict=True):
            if not is_wanted:
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            grads.append(parameter.grad)
            views.append(view)
        if grads:
            torch._foreach_copy_(grads, views)


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
    order: list[list[torch.nn.Parameter]] = []
    last: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
    room: dict[tuple[torch.dtype, torch.device], int] = {}
    for parameter in reversed(parameters):
        kind, size = (parameter.dtype, parameter.device), parameter.numel() * parameter.element_size()
        if kind not in last or room[kind] < size:
            last[kind], room[kind] = [], bucket_bytes
            order.append(last[kind])
        last[kind].append(parameter)
        room[kind] -= size
    buckets: list[Bucket] = []
    for run in order:
        buckets.append(Bucket(run, group, sum(len(bucket.parameters) for bucket in buckets)))
    return buckets
