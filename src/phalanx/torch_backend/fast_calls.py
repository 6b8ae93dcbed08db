"""The core's way of simple calls: from a function of torch to the fast path of a group, with hardly any Python between.

It takes calls that nothing watches, on plain tensors, with the group's own timeout, while nothing else is in line. All
others it declines, before anything has happened, and the methods of the process group do them. Where there is no core,
or torch is too old to say where a tensor's memory is, there are no fast calls.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed.distributed_c10d as c10d

from .._native import PLAIN, core
from ..group import Group
from .reduce_ops import SIMPLE_NAMES

if TYPE_CHECKING:
    from .._core import TorchAccess, TorchCalls

__all__ = ["WATCHERS", "are_available", "calls_of"]

WATCHERS = (
    torch._C._len_torch_dispatch_stack,
    torch._C._autograd._profiler_enabled,
    torch._C._functorch.peek_interpreter_stack,
)
"""Functions that say 0, False or None where nothing watches what torch does."""

_EXCHANGE_API = "__dlpack_c_exchange_api__"
_BOOL, _INT, _UINT, _FLOAT, _BFLOAT = 6, 0, 1, 2, 4
_FLOAT8 = range(7, 15)
"""DLPack's codes of dtypes."""
_DTYPES = [
    (_BOOL, "bool"),
    *((_INT, f"int{bits}") for bits in (8, 16, 32, 64)),
    *((_UINT, f"uint{bits}") for bits in (8, 16, 32, 64)),
    *((_FLOAT, f"float{bits}") for bits in (16, 32, 64)),
]
_STAND_INS = [(_BFLOAT, "uint16"), *((code, "uint8") for code in _FLOAT8)]
"""Dtypes that NumPy lacks: moved as what has the same size. Complex ones are not here: they may be conjugated."""

_OPTIONS = {
    "all_reduce": (c10d.AllreduceOptions, True, False),
    "broadcast": (c10d.BroadcastOptions, False, True),
    "reduce": (c10d.ReduceOptions, True, True),
    "all_gather": (c10d.AllgatherOptions, False, False),
    "reduce_scatter": (c10d.ReduceScatterOptions, True, False),
    "all_to_all": (c10d.AllToAllOptions, False, False),
    "barrier": (c10d.BarrierOptions, False, False),
}
"""torch's options of each operation, whether they name a reduction, and whether they name a root."""


def calls_of(group: Group, lines: list[tuple[Any, Any]], finished: type) -> TorchCalls | None:
    """The fast calls of a group, if there are any.

    Args:
        lines: The deque and the turn's lock of each of its lines: for collectives, sent and received messages.
        finished: The class of the handle of an operation that is done.
    """
    access = _access(finished)
    return None if access is None or core is None else core.TorchCalls(access, group, lines)


def are_available() -> bool:
    """Whether there is a core, and this torch says all that it must know."""
    return (
        core is not None
        and hasattr(torch.Tensor, _EXCHANGE_API)
        and all(hasattr(kind(), "asyncOp") for kind, _, _ in _OPTIONS.values())
    )


@functools.cache
def _access(finished: type) -> TorchAccess | None:
    if core is None or not are_available():
        return None
    dtypes = [_row(code, name, stand_in=False) for code, name in _DTYPES]
    dtypes += [_row(code, name, stand_in=True) for code, name in _STAND_INS]
    exchange = getattr(torch.Tensor, _EXCHANGE_API)
    reader = core.TensorReader([torch.Tensor, torch.nn.Parameter], exchange, torch.Tensor.is_neg, dtypes)
    options = core.OptionsReader(c10d.AllreduceOptions().timeout, list(SIMPLE_NAMES.items()))
    access: TorchAccess = core.TorchAccess(reader, options, list(WATCHERS), finished)
    for name, kind in _OPTIONS.items():
        setattr(access, name, core.OptionsKind(*kind))
    return access


def _row(code: int, name: str, *, stand_in: bool) -> tuple[int, int, int, int]:
    dtype = np.dtype(name)
    return code, 8 * dtype.itemsize, PLAIN.index(dtype.char), int(stand_in)
