"""Shows operations to whatever watches torch: dispatch modes, the profiler, tensor subclasses, hooks of a group.

torch's own groups hand every operation to its dispatcher, as `c10d::allreduce_` and its kin: there it is counted,
traced, faked, profiled or recorded, and only then done. That takes longer than a short collective does, so an operation
that nothing watches goes straight to Phalanx.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import _disable_current_modes

from .._native import core
from ..frames import hide_frames
from .errors import translated
from .group_interface import TorchGroup
from .profiled import is_profiled, profile

__all__ = ["OLDER_NAMES", "OPERATIONS", "perform", "running", "unwatched", "visible"]

Perform = Callable[..., Any]

OLDER_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
"""The names of these operations before torch 2.13."""
OPERATIONS: dict[str, Perform] = {}
"""Phalanx's function for each of torch's operations, by the name of the method."""

COUNTED = {"all_gather_single", "allgather", "allgather_coalesced", "gather", "reduce_scatter", "alltoall"}
"""Operations whose outputs torch's own backends write by an operation of torch, so that it counts the change: what
autograd has saved of them before is refused, and not used with other values in it."""
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack


class _Running(threading.local):
    call: DispatchedCall | None = None


class DispatchedCall:
    """A call that is on its way through the dispatcher."""

    __slots__ = ("args", "kwargs", "operation", "work")

    def __init__(self, operation: Perform, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.operation = operation
        self.args = args
        self.kwargs = kwargs
        self.work: Any = None
        """The work that Phalanx began for it, if the call came through."""


running = _Running()
"""The innermost of those calls of this thread."""


def visible(operation: Perform) -> Perform:
    """Decorates the method of a process group that does an operation: the dispatcher gets it if something watches.

    The core does simple calls by itself, and has this function called for the others.
    """
    name = operation.__name__
    OPERATIONS[name] = operation
    if not hasattr(dist.ProcessGroup, name):
        name = OLDER_NAMES[name]
    through = getattr(dist.ProcessGroup, name)
    counted = operation.__name__ in COUNTED

    def call(self: TorchGroup, *args: Any, **kwargs: Any) -> Any:
        try:
            if not (self.hooked or _modes() or is_profiled() or _transforms() is not None) and _are_plain(args, kwargs):
                work = operation(self, *args, **kwargs)
                if counted and args:
                    _count_change(args[0])
                return work
            device = _device_type(args, kwargs)
            if not self.does_itself(device):  # the group for that device shows it
                return operation(self, *args, **kwargs)
            self.prepare_dispatch(device)
            outer, running.call = running.call, DispatchedCall(operation, args, kwargs)
            mine = running.call
            try:
                found = through(self, *args, **kwargs)
            finally:
                running.call = outer
            # C++ gives back what stands for the work, without its errors and its results.
            return found if mine.work is None else mine.work
        except BaseException as error:
            hide_frames(error)
            raise

    # By the name of the function that calls it, torch knows that the method of C++ is meant, not again this one.
    call.__code__ = call.__code__.replace(co_name=name)
    general = functools.wraps(operation)(call)
    if core is None or operation.__name__ not in core.TORCH_OPERATIONS:
        return general
    method: Perform = core.TorchMethod(general, _shown)
    return method


def _shown(error: BaseException) -> BaseException:
    """The error to raise in the place of one that a call of the core has raised."""
    shown = translated(error)
    if shown is not error:
        shown.__context__, shown.__suppress_context__ = error.__context__, True
    hide_frames(shown)
    return shown


def _count_change(outputs: Any) -> None:
    """Tells autograd that tensors are written: a tensor, a list of them, or a list of lists."""
    if type(outputs) is list and outputs and type(outputs[0]) is list:
        outputs = outputs[0] if len(outputs) == 1 else [tensor for each in outputs for tensor in each]
    increment_version(outputs)


def perform(group: TorchGroup, operation: Perform, *args: Any, **kwargs: Any) -> Any:
    """Does an operation that has come through the dispatcher."""
    if is_profiled():
        work = profile(operation.__name__, args, lambda: operation(group, *args, **kwargs))
    else:
        work = operation(group, *args, **kwargs)
    if running.call is not None and running.call.operation is operation:
        running.call.work = work
    return work


def unwatched(job: Perform, *args: Any) -> Any:
    """Runs what belongs to an operation that was shown before, in a thread of a program that may be watched now."""
    if not _modes():
        return job(*args)
    with _disable_current_modes():
        return job(*args)


def _are_plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether no tensor is of a class that wants to see what is done with it."""
    for arg in (*args[:2], *kwargs.values()) if kwargs else args[:2]:
        kind = type(arg)
        if kind is list or kind is tuple:
            if not _PLAIN.issuperset(map(type, arg)) and not all(_are_plain((part,), {}) for part in arg):
                return False
        elif kind not in _PLAIN and isinstance(arg, torch.Tensor):
            return False
    return True


def _device_type(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Where the tensors of a call are; without any it is done on the CPU."""
    for arg in (*args[:2], *kwargs.values()):
        if isinstance(arg, (list, tuple)) and arg:
            return _device_type(tuple(arg), {})
        if isinstance(arg, torch.Tensor):
            return str(arg.device.type)
    return "cpu"
