"""Which rows of which parameters belong to which rank, and how they lie in the memory that is sent."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

__all__ = ["Layout"]


class Layout:
    """Some tensors, each cut into rows for the ranks of a group, as even as it can be.

    What belongs to a rank is its part: its rows of the first tensor, then those of the second, and so on. All parts are
    as long as the longest, so that they can be gathered and scattered.

    Args:
        shapes: Of the tensors. One without dims counts as one row.
        ranks: The number of ranks.
        in_blocks: The indices of tensors of which all ranks have exactly as many rows, but for the last one, which has
            the remainder, too: then the rows of all ranks can be scattered from where they lie.
    """

    def __init__(self, shapes: Sequence[torch.Size], ranks: int, in_blocks: Collection[int] = ()) -> None:
        self.in_blocks = frozenset(in_blocks)
        self.shapes = [tuple(shape) for shape in shapes]
        self.ranks = ranks
        self._rows = [shape[0] if shape else 1 for shape in self.shapes]
        self._widths = [torch.Size(shape[1:]).numel() for shape in self.shapes]
        self._sizes = [
            [(last - first) * width for (first, last), width in zip(self._cuts(rank), self._widths, strict=True)]
            for rank in range(ranks)
        ]
        self.length = max(sum(sizes) for sizes in self._sizes)
        """Elements of a part."""

    def rows(self, index: int, rank: int) -> tuple[int, int]:
        """The first row of a tensor that belongs to a rank, and the first that does not any more."""
        count = self._rows[index]
        if index in self.in_blocks:
            each = count // self.ranks
            return each * rank, count if rank == self.ranks - 1 else each * (rank + 1)
        return count * rank // self.ranks, count * (rank + 1) // self.ranks

    def _cuts(self, rank: int) -> list[tuple[int, int]]:
        return [self.rows(index, rank) for index in range(len(self.shapes))]

    def rows_of(self, tensors: Sequence[torch.Tensor], rank: int) -> list[torch.Tensor]:
        """The rows of whole tensors that belong to a rank, as views. A tensor without dims becomes one with a row."""
        return [
            (tensor if tensor.dim() else tensor.view(1))[first:last]
            for tensor, (first, last) in zip(tensors, self._cuts(rank), strict=True)
        ]

    def views(self, part: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """The rows inside of the part of a rank."""
        found, place = [], 0
        for shape, size, (first, last) in zip(self.shapes, self._sizes[rank], self._cuts(rank), strict=True):
            found.append(part[place : place + size].view(last - first, *shape[1:]))
            place += size
        return found

    def pack(self, tensors: Sequence[torch.Tensor | None], parts: torch.Tensor) -> None:
        """Copies whole tensors into the parts of all ranks, one behind the other. None counts as zeros."""
        for rank in range(self.ranks):
            part = parts[rank * self.length : (rank + 1) * self.length]
            place = 0
            for tensor, size, (first, last) in zip(tensors, self._sizes[rank], self._cuts(rank), strict=True):
                target = part[place : place + size]
                if tensor is None:
                    target.zero_()
                elif size:
                    rows = (tensor if tensor.dim() else tensor.view(1))[first:last]
                    target.view(rows.shape).copy_(rows)
                place += size
            part[place:].zero_()

    def unpack(self, parts: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Copies the parts of all ranks into whole tensors."""
        for rank in range(self.ranks):
            part = parts[rank * self.length : (rank + 1) * self.length]
            for rows, view in zip(self.rows_of(tensors, rank), self.views(part, rank), strict=True):
                rows.copy_(view)
