"""The arguments of an operation, as torch gives them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ..errors import UsageError
from .work import seconds_of

__all__ = ["OperationRequest", "only"]

_KINDS: dict[type, tuple[bool, bool]] = {
    c10d.AllreduceOptions: (True, False),
    c10d.AllreduceCoalescedOptions: (True, False),
    c10d.ReduceOptions: (True, True),
    c10d.ReduceScatterOptions: (True, False),
    c10d.BroadcastOptions: (False, True),
    c10d.GatherOptions: (False, True),
    c10d.ScatterOptions: (False, True),
    c10d.AllgatherOptions: (False, False),
    c10d.AllToAllOptions: (False, False),
    c10d.BarrierOptions: (False, False),
}
"""torch's options: whether they name a reduction, and whether they name a root."""
_SAYS_WHEN = hasattr(c10d.AllreduceOptions(), "asyncOp")
"""Whether this torch says which calls are asynchronous. Older ones do not: they wait for all of them."""


class OperationRequest:
    """The arguments of an operation, which torch gives in an options object or one by one."""

    __slots__ = ("_given", "later", "op", "root", "seconds")

    def __init__(self, options: Any = None, *, timeout: Any = None, op: Any = None, root: int = 0) -> None:
        kind = _KINDS.get(type(options))
        self.root = root
        self._given = options if kind is not None else None
        if kind is not None:
            says_op, says_root = kind
            self.later = options.asyncOp if _SAYS_WHEN else True
            limit = options.timeout
            self.seconds = None if limit.days < 0 else seconds_of(limit)
            self.op = options.reduceOp if says_op else None
            if says_root:
                self.root = options.rootRank
            return
        self.later = True
        self.seconds = seconds_of(timeout)
        self.op = op
        if isinstance(options, int):
            self.root = options
        elif options is not None:
            self.op = options
        if self.op is None:
            self.op = dist.ReduceOp.SUM

    def options(self, kind: type) -> Any:
        """The same as an options object of torch, for the group of another device."""
        if self._given is not None:
            return self._given
        options = kind()
        says_op, says_root = _KINDS[kind]
        if self.seconds is not None:
            options.timeout = timedelta(seconds=self.seconds)
        if says_op:
            options.reduceOp = self.op
        if says_root:
            options.rootRank = self.root
        return options


def only(tensors: Any, what: str) -> Any:
    """The one tensor of a list: the lists are from a time when a process had several devices.

    Raises:
        UsageError: There is another number of them.
    """
    if isinstance(tensors, (list, tuple)):
        if len(tensors) != 1:
            raise UsageError(f"{what}: got {len(tensors)} tensors (expected 1: a process takes part with one)")
        return tensors[0]
    return tensors
