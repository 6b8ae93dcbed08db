"""The average of the gradients of a unit, of which each rank gets its rows.

Large gradients are scattered from where they lie, in equal blocks of rows; rows that are too many for that go to all
ranks. The others are copied one behind the other, so that they travel together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...group import Group, Work
from .layout import Layout

__all__ = ["Averaging", "large_ones"]

_LARGE = 1 << 20
"""Bytes from which a gradient is not copied."""


def large_ones(shapes: Sequence[torch.Size], ranks: int, dtype: torch.dtype) -> set[int]:
    """The indices of tensors whose gradients are scattered from where they lie."""
    return {
        index
        for index, shape in enumerate(shapes)
        if shape and shape[0] >= ranks and shape.numel() * dtype.itemsize >= _LARGE
    }


class Averaging:
    """One average under way.

    Args:
        gradients: Of all ranks' rows; None counts as zeros. They must not change before `wait` has returned.
        layout: Of the unit.
        group: The ranks that share the rows; None if this one has all of them.
        replicas: The ranks that have the same rows; None if there are no others.
        dtype: Of the average.
    """

    def __init__(
        self,
        gradients: Sequence[torch.Tensor | None],
        layout: Layout,
        group: Group | None,
        replicas: Group | None,
        *,
        dtype: torch.dtype,
        timeout: float | None,
    ) -> None:
        self._layout = layout
        self._group = group
        self._replicas = replicas
        self._dtype = dtype
        self._timeout = timeout
        self._rank = 0 if group is None else group.rank
        self._is_last = self._rank == layout.ranks - 1
        self._works: list[Work[Any]] = []
        self._large: dict[int, torch.Tensor] = {}
        """This rank's rows of large gradients."""
        self._tails: dict[int, torch.Tensor] = {}
        for index in sorted(layout.in_blocks):
            self._scatter(index, gradients[index])
        self._small = [index for index in range(len(gradients)) if index not in layout.in_blocks]
        self._packing = Layout([torch.Size(layout.shapes[index]) for index in self._small], layout.ranks)
        self._packed = torch.empty(layout.ranks * self._packing.length, dtype=dtype)
        self._packing.pack([gradients[index] for index in self._small], self._packed)
        if group is not None and self._packed.numel():
            mine = torch.empty(self._packing.length, dtype=dtype)
            self._works.append(group.reduce_scatter(self._packed, "mean", mine, async_op=True, timeout=timeout))
            self._packed = mine

    def _scatter(self, index: int, gradient: torch.Tensor | None) -> None:
        shape = self._layout.shapes[index]
        whole = torch.zeros(shape, dtype=self._dtype) if gradient is None else gradient.to(self._dtype).contiguous()
        if self._group is None:
            self._large[index] = whole
            return
        each = shape[0] // self._layout.ranks
        first, last = self._layout.rows(index, self._rank)
        mine = torch.empty((last - first, *shape[1:]), dtype=self._dtype)
        blocks = whole[: each * self._layout.ranks]
        work = self._group.reduce_scatter(blocks, "mean", mine[:each], async_op=True, timeout=self._timeout)
        self._works.append(work)
        self._large[index] = mine
        if shape[0] % self._layout.ranks:
            tail = whole[each * self._layout.ranks :].clone()
            self._works.append(self._group.all_reduce(tail, "mean", async_op=True, timeout=self._timeout))
            self._tails[index] = tail

    def wait(self) -> None:
        """Returns when the average is there. Nothing refers to the gradients any more."""
        works, self._works = self._works, []
        for work in works:
            work.wait()
        if self._is_last:
            for index, tail in self._tails.items():
                self._large[index][-len(tail) :] = tail
        self._tails = {}
        if self._replicas is not None:
            for found in [*self._large.values(), self._packed]:
                if found.numel():
                    self._replicas.all_reduce(found, op="mean", timeout=self._timeout)

    def rows(self) -> list[torch.Tensor]:
        """This rank's rows of each gradient."""
        views = dict(zip(self._small, self._packing.views(self._packed, self._rank), strict=True))
        return [found for _, found in sorted({**self._large, **views}.items())]
