"""Workarounds for older releases of torch.

Before 2.13, some operations have other names.

Before 2.7, torch lets the Python part of a `Work` die once only C++ holds it. What is left then has no `wait` and no
`get_future`, and DDP and the functional collectives, which hold theirs in C++, fail or wait for ever. So they get a
`Work` that is C++ altogether: one around a future. And `destroy_process_group` only lets go of a group, without a word
to it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from .visible import OLDER_NAMES

__all__ = ["fitted"]

_Group = TypeVar("_Group", bound=type[Any])

_IS_OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7)
_FROM_FUTURE = "_create_work_from_future"  # torch's types do not know it
_REACHED_FROM_CPP = (
    "_allgather_base",
    "_reduce_scatter_base",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "reduce_scatter",
    "reduce_scatter_tensor_coalesced",
)
"""Collectives; messages are called from Python, which keeps what it holds."""


def fitted(group: _Group) -> _Group:
    """Decorates the class of a process group: it does the same on an old torch as on others."""
    for name, older in OLDER_NAMES.items():
        if not hasattr(dist.ProcessGroup, name):
            setattr(group, older, getattr(group, name))
    if _IS_OLD:
        for name in _REACHED_FROM_CPP:
            setattr(group, name, _lasting(getattr(group, name), name))
        group.__del__ = lambda self: self.shutdown()
    return group


def _lasting(operation: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(operation)
    def call(*args: Any, **kwargs: Any) -> Any:
        work = operation(*args, **kwargs)
        # Python calls it by its name, and holds what it gets. C++ has no frame: this one called something else.
        caller = sys._getframe().f_back
        if caller is not None and name in caller.f_code.co_names:
            return work
        return getattr(_distributed_c10d, _FROM_FUTURE)(work.get_future())

    return call
