"""Operations of `torch.ops._c10d_functional` that C++ cannot hand to a group that is written in Python.

Compiled programs use them. torch implements them for all devices at once, through a backend in C++. These are for
tensors of the CPU and of a GPU, which torch looks for first; they do the same for every group, through its methods in
Python.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

__all__ = ["register"]

_REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}


@functools.cache  # once per process; what is returned keeps the registration alive
def register() -> Any:
    """Makes the operations known to torch, if this release has them."""
    library = torch.library.Library("_c10d_functional", "IMPL")
    for name, function in (
        ("all_gather_into_tensor_out", _all_gather_into_tensor_out),
        ("reduce_scatter_tensor_out", _reduce_scatter_tensor_out),
    ):
        if hasattr(torch.ops._c10d_functional, name):
            for device in ("CPU", "CUDA"):
                library.impl(name, function, device)
    return library


def _all_gather_into_tensor_out(input: Any, group_size: int, group_name: str, *, out: Any) -> Any:  # noqa: A002
    group = c10d._resolve_process_group(group_name)
    gather = getattr(group, "all_gather_single", None) or group._allgather_base
    return _under_way(out, gather(out, input, c10d.AllgatherOptions()))


def _reduce_scatter_tensor_out(
    input: Any,  # noqa: A002
    reduce_op: str,
    group_size: int,
    group_name: str,
    *,
    out: Any,
) -> Any:
    group = c10d._resolve_process_group(group_name)
    options = c10d.ReduceScatterOptions()
    options.reduceOp = _REDUCTIONS[reduce_op.lower()]
    scatter = getattr(group, "reduce_scatter_single", None) or group._reduce_scatter_base
    return _under_way(out, scatter(out, input, options))


def _under_way(tensor: Any, work: Any) -> Any:
    """Leaves the work where `wait_tensor` will look for it."""
    torch._C._distributed_c10d._register_work(tensor, work)
    return tensor
