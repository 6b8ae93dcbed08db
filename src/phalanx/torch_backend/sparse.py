"""All-reduce of sparse tensors: the gradient of an embedding, under torch's own data parallel."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..errors import UnsupportedOp, UsageError
from ..group import Group
from .tensors import source

__all__ = ["all_reduce_sparse"]

_SUM = hash(dist.ReduceOp.SUM)


def all_reduce_sparse(group: Group, tensor: Any, op: Any, seconds: float | None) -> None:
    """The sum of sparse tensors in coordinate format, in place: everybody gets the entries of all.

    Raises:
        UnsupportedOp: The reduction is not a sum.
        UsageError: The ranks' tensors are not of one shape.
    """
    if hash(op) != _SUM:
        raise UnsupportedOp("a sparse tensor can only be summed (use op=SUM, or make it dense)")
    mine = tensor.detach().coalesce()
    indices, values = mine.indices(), mine.values()
    shape = [indices.shape[0], *mine.shape]
    counts = np.empty(group.world_size, np.int64)
    group.all_gather(np.array([values.shape[0]], np.int64), counts, timeout=seconds)
    largest = np.array(shape, np.int64)
    group.all_reduce(largest, "max", timeout=seconds)
    if largest.tolist() != shape:
        raise UsageError(
            f"all_reduce: this rank's sparse tensor has shape {tuple(mine.shape)}, but another rank's is larger"
        )
    most = int(counts.max())
    every_index = _gather(group, indices.t().contiguous(), most, seconds)
    every_value = _gather(group, values.contiguous(), most, seconds)
    kept = [
        (index[:count], value[:count]) for index, value, count in zip(every_index, every_value, counts, strict=True)
    ]
    total = torch.sparse_coo_tensor(
        torch.cat([index for index, _ in kept]).t(),
        torch.cat([value for _, value in kept]),
        mine.shape,
        device="cpu",
        check_invariants=False,
    ).coalesce()
    with torch.no_grad():  # a detached one would take the values for itself
        tensor.copy_(total)


def _gather(group: Group, rows: Any, most: int, seconds: float | None) -> Any:
    """The rows of all ranks, each filled up to the same number."""
    padded = rows.new_zeros((most, *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    everyone = rows.new_empty((group.world_size, *padded.shape))
    group.all_gather(source(padded), source(everyone), timeout=seconds)
    return everyone
