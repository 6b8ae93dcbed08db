"""The base of a process group: requests, memory, and the way to the runner."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..deadline import Deadline
from ..errors import UnsupportedArray
from ..group import Group
from . import devices
from .collective_work import PreparedWork
from .cpu_backend import HAS_BACKENDS, CpuBackend, kernels
from .fast_calls import calls_of
from .message_work import PreparedMessageWork
from .request import OperationRequest
from .runner import Runner
from .tensor_lists import SLICE, Places
from .work import FinishedWork, Job

__all__ = ["GroupBase"]

_LONG = 1 << 62
"""The size of an operation whose size is unknown."""
_HANDLES = (FinishedWork, PreparedWork, PreparedMessageWork)
"""The handles that the core makes: of operations that are done, of collectives and of messages in line."""
_KEPT = 32 << 20
"""Bytes of memory that a group keeps."""
_groups: weakref.WeakSet[GroupBase] = weakref.WeakSet()
"""Those that exist."""


class GroupBase(dist.ProcessGroup):  # type: ignore[misc]  # torch is not typed here
    """A process group of torch made of a group of Phalanx."""

    def __init__(self, group: Group) -> None:
        # The constructor with a store refuses subclasses.
        dist.ProcessGroup.__init__(self, group.rank, group.world_size)
        self._use(group)
        self._seconds: float | None = None
        """Set by `set_timeout`; None is the group's own, which is quickest."""
        self._coalesced: list[Any] | None = None
        """Operations issued since `_start_coalescing`."""
        self._memory = np.empty(0, np.uint8)
        self._address = 0
        self.device_groups: dict[str, Any] = {}
        """The groups for tensors that are not on the CPU, by the type of the device; None while one is being made."""
        self.hooked = False
        """Whether every operation goes by torch's dispatcher, because a hook of the group is to see it."""
        self._dispatched: set[str] = set()
        """Types of devices whose operations torch's dispatcher leads here."""
        if HAS_BACKENDS:
            self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
            self._register("cpu")

    def _use(self, group: Group) -> None:
        """Has everything done by this group from now on."""
        self.group = group
        """The Phalanx group behind it."""
        self._runner = Runner(group.timeout)
        self._lines = (Runner(group.timeout), Runner(group.timeout))
        """For messages that are sent, and for those that are received: neither may hold up the other."""
        self.fast_calls = calls_of(group, [self._runner, *self._lines], _HANDLES)
        """The core's way of simple calls, if there is one."""
        _groups.add(self)
        # Once more for each, because the last function registered runs first: before the world is closed.
        atexit.unregister(_finish_at_exit)
        atexit.register(_finish_at_exit)

    def finish(self) -> None:
        """Runs the collectives that are in line, and begins the messages."""
        for line in (self._runner, *self._lines):
            line.drain()

    def does_itself(self, device_type: str) -> bool:
        """Whether operations on that type of device are Phalanx's own, not those of another group of torch."""
        return device_type == "cpu" or (device_type == "cuda" and devices.are_own(self, device_type))

    def prepare_dispatch(self, device_type: str) -> None:
        """Makes sure that torch's dispatcher leads back here."""
        if not HAS_BACKENDS:
            kernels()
        elif device_type not in self._dispatched:
            self._register(device_type)

    def _register(self, device_type: str) -> None:
        """Tells torch that operations on that type of device come here."""
        backend = CpuBackend(self)
        self._register_backend(torch.device(device_type), dist.ProcessGroup.BackendType.CUSTOM, backend)
        self._dispatched.add(device_type)

    def _open_fast_calls(self) -> None:
        """Lets the core do simple calls, unless each has something about it that the core does not know."""
        if self.fast_calls is not None:
            self.fast_calls.closed = self.hooked or self._seconds is not None or self._coalesced is not None

    def _issue(self, job: Job, request: OperationRequest, tensors: Any, size: int = _LONG) -> Any:
        seconds = self._seconds if request.seconds is None else request.seconds
        work = self._runner.issue(job, seconds, tensors, later=request.later, size=size)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _scratch(self, count: int, dtype: Any) -> Any:
        """Memory for what an operation puts together before it is copied on. For the operation whose turn it is.

        It is kept for the next one, unless it is large: fresh memory costs as much as the copy.
        """
        size = count * dtype.itemsize
        if size > _KEPT:
            return np.empty(count, dtype)
        if self._memory.size < size:
            self._memory = np.empty(size, np.uint8)
            self._address = self._memory.ctypes.data
        return self._memory[:size].view(dtype)

    def _stage(self, like: Places, lists: int = 1) -> tuple[Any, int]:
        """The same for one list of tensors or several, each as long as there are ranks: an array, and its address."""
        array = self._scratch(lists * self.group.world_size * like.elements, like.dtype)
        return array, self._address if array.base is self._memory else array.ctypes.data

    def _rows(self, part: slice, dtype: Any, times: int = 1) -> Any:
        """Memory for a slice of as many tensors as there are ranks, or so many times as many; a row for each."""
        rows, length = times * self.group.world_size, part.stop - part.start
        return self._scratch(rows * length, dtype).reshape(rows, length)

    def _in_slices(self, size: int) -> bool:
        """Whether an operation on lists of tensors of so many bytes is done slice by slice.

        All ranks say the same, wherever their tensors lie. Where the core takes lists as they are, one rank may have
        them as it likes them, and another not.
        """
        if size <= SLICE:
            return False
        if self.group._engine is None:  # the first operation of the group finds it
            self.group.barrier(timeout=self._seconds)
        engine = self.group._engine
        return engine is None or not engine.takes_parts

    def _slices(self, count: int, dtype: Any, seconds: float | None) -> Iterator[tuple[slice, float | None]]:
        """Cuts tensors that lie apart, and are longer than a slice, for an operation on one array at a time.

        Args:
            count: Elements of each tensor, the same on all ranks.
            seconds: For all of it.

        Yields:
            What to take of each tensor, and the seconds that are left; None is the group's default, which is quickest.
        """
        step = max(1, SLICE // dtype.itemsize)
        if count <= step:
            yield slice(0, count), seconds
            return
        deadline = Deadline(self.group.timeout if seconds is None else seconds)
        for start in range(0, count, step):
            yield slice(start, min(start + step, count)), deadline.remaining()

    def _on(self, tensor: Any, operation: str) -> Any:
        """An operation of the group for a tensor that is not on the CPU.

        Raises:
            UnsupportedArray: This one was not made with a backend for its device.
        """
        return devices.operation_of(self._for(tensor.device), operation)

    def _for(self, device: Any) -> Any:
        kind = device.type
        if kind not in self.device_groups:
            self.device_groups[kind] = None  # under way: torch asks for this group's devices meanwhile
            try:
                self.device_groups[kind] = devices.group_for(self, device)
            finally:
                if self.device_groups[kind] is None:
                    del self.device_groups[kind]
        if self.device_groups[kind] is None:
            raise UnsupportedArray(f"the group for tensors on {device} is still being made")
        return self.device_groups[kind]


def _finish_at_exit() -> None:
    """Does what the program has begun and has not waited for: the other ranks may."""
    for group in list(_groups):
        if not group.group._backend.forked:
            group.finish()
