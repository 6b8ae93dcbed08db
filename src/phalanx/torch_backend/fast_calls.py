"""The core's way of simple calls: from a function of torch to the fast path of a group, with hardly any Python between.

It takes calls that nothing watches, on plain tensors, with the group's own timeout, while nothing else is in line. All
others it declines, before anything has happened, and the methods of the process group do them. Where there is no core,
or torch is too old to say where a tensor's memory is, there are no fast calls.
"""

from __future__ import annotations

import functools
import inspect
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.autograd.graph import increment_version

from .._native import PLAIN, core
from ..group import Group
from .errors import translated
from .option_fields import places_of
from .reduce_ops import SIMPLE_NAMES
from .runner import SHORT, Runner
from .tensor_lists import SLICE
from .tensors import OTHER_DTYPES, PLAIN_DTYPES
from .watchers import WATCHERS, addresses_of_watchers

if TYPE_CHECKING:
    from .._core import TorchAccess, TorchCalls

__all__ = ["are_available", "calls_of"]

_EXCHANGE_API = "__dlpack_c_exchange_api__"
_OPTIONS = {
    "all_reduce": (c10d.AllreduceOptions, True, False),
    "broadcast": (c10d.BroadcastOptions, False, True),
    "reduce": (c10d.ReduceOptions, True, True),
    "all_gather": (c10d.AllgatherOptions, False, False),
    "reduce_scatter": (c10d.ReduceScatterOptions, True, False),
    "all_to_all": (c10d.AllToAllOptions, False, False),
    "gather": (c10d.GatherOptions, False, True),
    "scatter": (c10d.ScatterOptions, False, True),
    "barrier": (c10d.BarrierOptions, False, False),
}
"""torch's options of each operation, whether they name a reduction, and whether they name a root."""
_count_change = getattr(torch._C, "_increment_version", increment_version)
"""Tells autograd that the tensors of a sequence are written."""
_WAITING = (
    *(
        "all_reduce",
        "broadcast",
        "reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "gather",
        "scatter",
        "barrier",
    ),
    *("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor"),
    *("all_to_all_single", "send", "recv", "isend", "irecv"),
)
"""Functions of torch that wait for an operation, if it is not asynchronous, and drop its handle; and those by which
they begin one."""


def calls_of(group: Group, lines: list[Runner], handles: tuple[type, type, type]) -> TorchCalls | None:
    """The fast calls of a group, if there are any.

    Args:
        lines: For collectives, sent and received messages.
        handles: The classes of handles: of operations that are done, of collectives and of messages in line.
    """
    access = _access(handles)
    if access is None or core is None:
        return None
    calls: TorchCalls = core.TorchCalls(access, group, lines, group._messages.buffered, SHORT, SLICE)
    return calls


def are_available() -> bool:
    """Whether there is a core, and this torch says all that it must know."""
    return (
        core is not None
        and hasattr(torch.Tensor, _EXCHANGE_API)
        and all(hasattr(kind(), "asyncOp") for kind, _, _ in _OPTIONS.values())
    )


@functools.cache
def _access(handles: tuple[type, type, type]) -> TorchAccess | None:
    if core is None or not are_available():
        return None
    exchange = getattr(torch.Tensor, _EXCHANGE_API)
    reader = core.TensorReader([torch.Tensor, torch.nn.Parameter], exchange, torch.Tensor.is_neg, _dtypes())
    options = core.OptionsReader(c10d.AllreduceOptions().timeout, list(SIMPLE_NAMES.items()))
    access: TorchAccess = core.TorchAccess(
        *(reader, options, list(WATCHERS), addresses_of_watchers()),
        *(list(handles), dist.Work.__init__, translated, _count_change, _waiting()),
    )
    for name, (kind, has_op, has_root) in _OPTIONS.items():
        places = places_of(kind, has_op=has_op, has_root=has_root)
        setattr(access, name, core.OptionsKind(kind, has_op, has_root, places))
    return access


def _waiting() -> list[CodeType]:
    """The codes of those functions. What a program has put in the place of one may keep the handle: it is left out."""
    found = [inspect.unwrap(getattr(c10d, name)) for name in _WAITING if hasattr(c10d, name)]
    return [each.__code__ for each in found if isinstance(each, FunctionType) and each.__globals__ is vars(c10d)]


def _dtypes() -> list[tuple[Any, int, int, bool, bool, int]]:
    """The dtypes that the core knows; complex ones may be conjugated, which it does not look for."""
    rows = []
    for known, stands_in in ((PLAIN_DTYPES, False), (OTHER_DTYPES, True)):
        for dtype, (lies_as, size) in known.items():
            number = PLAIN.index(lies_as.char)
            own = len(PLAIN) if dtype is torch.bfloat16 else -1 if stands_in else number
            if not dtype.is_complex:
                rows.append((dtype, number, size, stands_in, dtype.is_floating_point, own))
    return rows
