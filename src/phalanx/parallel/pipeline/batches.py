"""Batches and micro-batches: how inputs and targets are split, and outputs put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...arguments import shown
from ...errors import UsageError

__all__ = ["Batch", "joined", "split"]


class Batch(NamedTuple):
    """A batch in parts."""

    parts: list[Any]
    length: int
    """The number of examples."""

    def size(self, part: int) -> int:
        """The number of examples in one part."""
        return self.length // len(self.parts) + (part < self.length % len(self.parts))


def split(batch: Any, count: int, what: str) -> Batch:
    """A batch in `count` parts along the first dim, the first ones longer by one where that is needed.

    Args:
        batch: A tensor, or a tuple or list of tensors of the same length. Anything else in it goes to every part.
        what: Its name in errors.

    Raises:
        UsageError: There are no tensors, they have different lengths, or fewer examples than parts.
    """
    single = not isinstance(batch, (tuple, list))
    values: Sequence[Any] = (batch,) if single else batch
    lengths = {len(value) for value in values if isinstance(value, torch.Tensor) and value.dim()}
    if len(lengths) != 1:
        found = f"tensors of lengths {sorted(lengths)}" if lengths else shown(batch)
        raise UsageError(f"{what}: {found} (expected a tensor, or a tuple of tensors that are equally long)")
    (length,) = lengths
    if length < count:
        raise UsageError(f"{what}: {length} examples cannot be split into {count} micro-batches")
    columns = [
        torch.tensor_split(value, count) if isinstance(value, torch.Tensor) and value.dim() else (value,) * count
        for value in values
    ]
    rows: list[Any] = list(zip(*columns, strict=True))
    return Batch([row[0] for row in rows] if single else rows, length)


def joined(outputs: Sequence[Any]) -> Any:
    """The outputs of all micro-batches as one, along the first dim.

    Raises:
        UsageError: They are neither tensors nor tuples and dicts of them.
    """
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(outputs)) if first.dim() else torch.stack(list(outputs))
    if isinstance(first, (tuple, list)):
        return tuple(joined(column) for column in zip(*outputs, strict=True))
    if isinstance(first, Mapping):
        return {key: joined([output[key] for output in outputs]) for key in first}
    if all(output is None for output in outputs):
        return None
    raise UsageError(
        f"the last stage returned {shown(first)}, which cannot be put together for all micro-batches (expected "
        "tensors, or tuples and dicts of them)"
    )
