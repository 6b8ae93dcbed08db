"""The core's way of simple calls: from a function of torch to the fast path of a group, with hardly any Python between.

It takes calls that nothing watches, on plain tensors, with the group's own timeout, while nothing else is in line. All
others it declines, before anything has happened, and the methods of the process group do them. Where there is no core,
or torch is too old to say where a tensor's memory is, there are no fast calls.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from .._native import PLAIN, core
from ..group import Group

if TYPE_CHECKING:
    from .._core import OptionsLayout, TorchAccess, TorchCalls

__all__ = ["WATCHERS", "calls_of"]

WATCHERS = (
    torch._C._len_torch_dispatch_stack,
    torch._C._autograd._profiler_enabled,
    torch._C._functorch.peek_interpreter_stack,
)
"""Functions that say 0, False or None where nothing watches what torch does."""

_BOOL, _INT, _UINT, _FLOAT, _BFLOAT, _COMPLEX = 6, 0, 1, 2, 4, 5
_FLOAT8 = range(7, 15)
"""DLPack's codes of dtypes."""
_DTYPES = [
    (_BOOL, "bool"),
    *((_INT, f"int{bits}") for bits in (8, 16, 32, 64)),
    *((_UINT, f"uint{bits}") for bits in (8, 16, 32, 64)),
    *((_FLOAT, f"float{bits}") for bits in (16, 32, 64)),
]
_STAND_INS = [(_BFLOAT, "uint16"), (_COMPLEX, "uint32"), *((code, "uint8") for code in _FLOAT8)]
"""Dtypes that NumPy lacks: moved as what has the same size."""

_RETURNS_AT_ONCE = "asyncOp"
_OPTIONS = {
    "all_reduce": (c10d.AllreduceOptions, (32, 40, 16, -1)),
    "broadcast": (c10d.BroadcastOptions, (16, 24, -1, 0)),
    "reduce": (c10d.ReduceOptions, (48, 56, 16, 32)),
    "all_gather": (c10d.AllgatherOptions, (0, 8, -1, -1)),
    "reduce_scatter": (c10d.ReduceScatterOptions, (32, 40, 16, -1)),
    "all_to_all": (c10d.AllToAllOptions, (0, 8, -1, -1)),
    "barrier": (c10d.BarrierOptions, (24, 35, -1, -1)),
}
"""torch's options of each operation, and the places of timeout, asyncOp, reduceOp and rootRank. They are checked."""


def calls_of(group: Group, lines: list[tuple[Any, Any]], finished: type) -> TorchCalls | None:
    """The fast calls of a group, if there are any.

    Args:
        lines: The deque and the turn's lock of each of its lines: for collectives, sent and received messages.
        finished: The class of the handle of an operation that is done.
    """
    access = _access(finished)
    return None if access is None or core is None else core.TorchCalls(access, group, lines)


@functools.cache
def _access(finished: type) -> TorchAccess | None:
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if core is None or exchange is None or not hasattr(c10d.AllreduceOptions(), _RETURNS_AT_ONCE):
        return None
    dtypes = [_row(code, name, stand_in=False) for code, name in _DTYPES]
    dtypes += [_row(code, name, stand_in=True) for code, name in _STAND_INS]
    reader = core.TensorReader([torch.Tensor, torch.nn.Parameter], exchange, torch.Tensor.is_neg, dtypes)
    access: TorchAccess = core.TorchAccess(reader, list(WATCHERS), finished)
    for name, (kind, places) in _OPTIONS.items():
        setattr(access, name, layout(kind, places))
    return access


def _row(code: int, name: str, *, stand_in: bool) -> tuple[int, int, int, int]:
    dtype = np.dtype(name)
    return code, 8 * dtype.itemsize, PLAIN.index(dtype.char), int(stand_in)


def layout(kind: Any, places: tuple[int, int, int, int]) -> OptionsLayout:
    """Where a class of options has its fields, if it is there that it has them."""
    assert core is not None
    has_op, has_root = places[2] >= 0, places[3] >= 0
    samples = []
    for number, op in enumerate((dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.BXOR)):
        options = kind()
        options.asyncOp = bool(number % 2)
        if number > 1:
            options.timeout = timedelta(milliseconds=1000 + number)
        if has_op:
            options.reduceOp = op
        if has_root:
            options.rootRank = 5 * number
        milliseconds = options.timeout // timedelta(milliseconds=1)
        op_number = hash(options.reduceOp) if has_op else -1
        samples.append((options, (milliseconds, int(options.asyncOp), op_number, options.rootRank if has_root else -1)))
    plain = type(kind).__name__ == "pybind11_type"  # else even the first step would be into the dark
    made: OptionsLayout = core.OptionsLayout(kind, places, samples if plain else [])
    return made
