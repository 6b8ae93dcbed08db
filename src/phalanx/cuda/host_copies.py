"""Copies between the memory of a GPU and that of the host, or inside the GPU, on a stream of Phalanx's own."""

from __future__ import annotations

import ctypes
import functools
import math
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..deadline import Deadline
from ..errors import Timeout
from .arrays import DeviceArray
from .driver import CudaDriver, driver
from .waiting import wait_for_stream

__all__ = ["HostCopies", "host_address", "host_copies", "lend", "read", "write"]

LONGEST = 1800.0
"""Seconds after which a copy for which no deadline was given has failed."""
PAGE = 4096
SMALLEST, LARGEST = 64 << 10, 64 << 20
"""Bytes of memory that is kept to be used again; a larger array has memory of its own."""


class HostCopies:
    """The copies of one GPU. Any thread may use it: the stream keeps them apart."""

    def __init__(self, known: CudaDriver, device: int) -> None:
        self.driver = known
        self.device = device
        with known.using(device):
            self.stream = known.new_stream()
        self._free: defaultdict[int, deque[npt.NDArray[np.uint8]]] = defaultdict(deque)
        """Memory that the driver knows, by its size: copies from and to it are several times quicker."""

    def lend(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[npt.NDArray[Any], Callable[[], object]]:
        """An array of the host to copy to or from, and a function that gives its memory back.

        It is given back when the array is collected, too, but that may be late.
        """
        needed = math.prod(shape) * dtype.itemsize
        if not 0 < needed <= LARGEST:
            return np.empty(shape, dtype), lambda: None
        size = max(SMALLEST, 1 << (needed - 1).bit_length())
        free = self._free[size]
        memory = free.pop() if free else self._new_memory(size)
        owner = (ctypes.c_char * size).from_buffer(memory.data)
        give_back = weakref.finalize(owner, free.append, memory)
        give_back.atexit = False
        array: npt.NDArray[Any] = np.frombuffer(memoryview(owner)[:needed], dtype).reshape(shape)
        return array, give_back

    def _new_memory(self, size: int) -> npt.NDArray[np.uint8]:
        memory = np.empty(size + PAGE, np.uint8)
        start = -host_address(memory) % PAGE  # whole pages, which nothing else has a part of
        with self.driver.using(self.device):
            self.driver.register(host_address(memory) + start, size)
        return memory[start : start + size]

    def load(self, array: DeviceArray, host: int, deadline: Deadline) -> bool:
        """Copies an array to an address of the host once it is computed; False if the deadline passed before."""
        if not array.ready.wait(deadline):
            return False
        if not array.nbytes:
            return True
        with self.driver.using(self.device):
            self.driver.copy_to_host(host, array.address, array.nbytes, self.stream)
            return wait_for_stream(self.driver, self.stream, deadline)

    def store(self, host: int, array: DeviceArray, deadline: Deadline) -> bool:
        """The reverse."""
        if not array.ready.wait(deadline):
            return False
        if not array.nbytes:
            return True
        with self.driver.using(self.device):
            self.driver.copy_to_device(array.address, host, array.nbytes, self.stream)
            return wait_for_stream(self.driver, self.stream, deadline)

    def copy(self, array: DeviceArray, to: DeviceArray, deadline: Deadline) -> bool:
        """Copies an array to another on the GPU; False if the deadline passed before."""
        if not array.ready.wait(deadline) or not to.ready.wait(deadline):
            return False
        if not array.nbytes or array.address == to.address:
            return True
        with self.driver.using(self.device):
            self.driver.copy(to.address, array.address, array.nbytes, self.stream)
            return wait_for_stream(self.driver, self.stream, deadline)


def host_address(host: npt.NDArray[Any]) -> int:
    """Where a contiguous array of the host begins."""
    return int(host.__array_interface__["data"][0])


@functools.cache
def _made(known: CudaDriver, device: int) -> HostCopies:
    return HostCopies(known, device)


def host_copies(device: int) -> HostCopies:
    """The copies of a GPU in this process.

    Raises:
        BackendUnavailable: There is no driver.
    """
    return _made(driver(), device)


def lend(array: DeviceArray, *, read: bool) -> tuple[npt.NDArray[Any], Callable[[], object]]:
    """An array of the host that is like one on a GPU, and a function that gives its memory back.

    Args:
        read: True for a copy of its values; else they are arbitrary.

    Raises:
        Timeout: It was not computed in half an hour.
    """
    host, give_back = host_copies(array.device).lend(array.shape, array.dtype)
    if read and not host_copies(array.device).load(array, host_address(host), Deadline(LONGEST)):
        raise Timeout(f"an array on a GPU was not computed within {LONGEST:g} s", seconds=LONGEST)
    return host, give_back


def read(array: DeviceArray) -> npt.NDArray[Any]:
    """A copy of an array on the host.

    Raises:
        Timeout: As `lend`.
    """
    return lend(array, read=True)[0]


def write(array: DeviceArray, values: npt.NDArray[Any]) -> None:
    """Copies values of the host to an array.

    Raises:
        Timeout: As `lend`.
    """
    host = np.ascontiguousarray(values)
    if not host_copies(array.device).store(host_address(host), array, Deadline(LONGEST)):
        raise Timeout(f"an array on a GPU was not computed within {LONGEST:g} s", seconds=LONGEST)
