"""The profiler's event of an operation, `phalanx:all_reduce` and its kin, as torch's own backends have theirs.

It lasts from the call until the operation has ended, and shows the shapes of the tensors. torch's backends in C++ mark
it as asynchronous. Python can say that in one way only: the event ends in another thread than the one that began it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..background_thread import BackgroundThread
from .work import FinishedWork, UnfinishedWork

__all__ = ["is_profiled", "profile"]

is_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Whether a profiler looks at this thread."""

_TITLES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "all_gather_single": "_all_gather_base",
    "all_gather_single_coalesced": "all_gather_into_tensor_coalesced",
    "alltoall": "all_to_all",
    "all_to_all_single": "all_to_all",
    "recv_anysource": "recvAnySource",
}
"""The names of operations in events, where these are not the methods': those of Gloo and NCCL."""
_GIVEN_SECOND = frozenset(_TITLES) - {"allreduce", "allreduce_coalesced", "recv_anysource"} | {
    "gather",
    "scatter",
    "reduce_scatter",
}
"""Operations that get the tensors for their results first, then those that they read."""


def profile(name: str, args: tuple[Any, ...], begin: Callable[[], Any]) -> Any:
    """Begins an operation and has the profiler see it; returns its work.

    Args:
        name: The method's.
        args: Its arguments, of which the event shows the tensors that are read.
    """
    read = args[1:2] if name in _GIVEN_SECOND else args[:1]
    event = _Event(f"phalanx:{_TITLES.get(name, name)}", list(_tensors(read)))
    try:
        work = begin()
    except BaseException:
        event.end()
        raise
    if isinstance(work, UnfinishedWork):
        work.call_at_end(event.end)
    elif work is None or isinstance(work, FinishedWork):
        event.end()
    return work


class _Event:
    def __init__(self, title: str, tensors: list[Any]) -> None:
        record = torch.autograd._record_function_with_args_enter(title, *tensors)
        self._thread = threading.get_ident()
        self._ended: Any = torch.futures.Future()
        # The end, too, must know which profiler it belongs to: torch carries that over with a future.
        torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(record, self._ended)

    def end(self) -> None:
        if threading.get_ident() != self._thread:
            self._ended.set_result(None)
            return
        BackgroundThread(lambda: self._ended.set_result(None), "phalanx-profiled").start().join()


def _tensors(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
