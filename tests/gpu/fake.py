"""A stand-in for the CUDA driver whose memory of a GPU is shared memory of the host, and arrays that lie there.

Processes open each other's memory as they would a GPU's. Kernels are done by NumPy, from the same bytes that a GPU
would get. A stream does at once what is put on it, unless a test holds it back.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import struct
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from phalanx._native import _DTYPES, _OPS, divide_in_place, reduce_into
from phalanx.cuda import driver as driver_module
from phalanx.cuda.driver import HANDLE_BYTES, CudaError, DeviceMemory
from phalanx.cuda.kernels.plan import unpack
from phalanx.group.engines.cuda import pace

_HANDLE = struct.Struct("<QQQ")


class FakeDriver:
    """As `CudaDriver`.

    Args:
        exports: False if memory cannot be given to other processes.
        uuid: Of the one GPU.
    """

    version = 13000
    device_count = 1

    def __init__(self, *, exports: bool = True, uuid: bytes = b"0123456789abcdef") -> None:
        self.exports = exports
        self.uuid = uuid
        self.calls: list[str] = []
        """The kernels that were launched."""
        self.registered: set[int] = set()
        self.opened: dict[int, mmap.mmap] = {}
        self.busy_events: set[int] = set()
        self.held_streams: set[int] = set()
        """Streams that do nothing for now; a mark on them is not done."""
        self.capturing: set[int] = set()
        self.kernel_seconds = 0.0
        self.on_launch: Any = lambda: None
        self._memory: dict[int, tuple[mmap.mmap, int, int, int]] = {}
        self._numbers = itertools.count(1)
        self._contexts = 0

    def device_name(self, device: int) -> str:
        return "Fake"

    def device_uuid(self, device: int) -> bytes:
        return self.uuid

    @contextlib.contextmanager
    def using(self, device: int) -> Iterator[None]:
        assert device == 0
        self._contexts += 1
        try:
            yield
        finally:
            self._contexts -= 1

    def allocate(self, size: int) -> int:
        fd = os.memfd_create("fake-gpu")
        os.ftruncate(fd, max(size, 1))
        memory = mmap.mmap(fd, max(size, 1))
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._memory[address] = (memory, fd, size, next(self._numbers))
        return address

    def free(self, address: int) -> None:
        _, fd, _, _ = self._memory.pop(address)
        os.close(fd)

    def buffer_id(self, address: int) -> int:
        try:
            return self.memory_at(address).buffer_id
        except CudaError:
            return 0

    def memory_at(self, address: int) -> DeviceMemory:
        for base, (_, _, size, number) in self._memory.items():
            if base <= address < base + max(size, 1):
                return DeviceMemory(0, base, size, number, self.exports)
        raise CudaError("cuPointerGetAttributes", 1, "CUDA_ERROR_INVALID_VALUE")

    def register(self, address: int, size: int) -> bool:
        assert address % mmap.PAGESIZE == 0
        assert size % mmap.PAGESIZE == 0
        self.registered.add(address)
        return True

    def unregister(self, address: int) -> None:
        self.registered.remove(address)

    def copy_to_host(self, host: int, address: int, size: int, stream: int) -> None:
        self.memory_at(address)
        ctypes.memmove(host, address, size)

    def copy_to_device(self, address: int, host: int, size: int, stream: int) -> None:
        self.memory_at(address)
        ctypes.memmove(address, host, size)

    def copy(self, to: int, address: int, size: int, stream: int) -> None:
        ctypes.memmove(to, address, size)

    def new_stream(self) -> int:
        assert self._contexts
        return next(self._numbers)

    def end_stream(self, stream: int) -> None:
        """Nothing to give back."""

    def is_capturing(self, stream: int) -> bool:
        return stream in self.capturing

    def is_idle(self, stream: int) -> bool:
        return stream not in self.held_streams

    def new_event(self) -> int:
        assert self._contexts
        return next(self._numbers)

    def end_event(self, event: int) -> None:
        """Nothing to give back."""

    def record(self, event: int, stream: int) -> None:
        (self.busy_events.add if stream in self.held_streams else self.busy_events.discard)(event)

    def is_done(self, event: int) -> bool:
        return event not in self.busy_events

    def release(self, stream: int) -> None:
        """Lets a stream go on."""
        self.held_streams.discard(stream)
        self.busy_events.clear()

    def export(self, base: int) -> bytes:
        _, fd, size, _ = self._memory[base]
        return _HANDLE.pack(os.getpid(), fd, size).ljust(HANDLE_BYTES, b"\0")

    def open(self, handle: bytes) -> int:
        pid, fd, size = _HANDLE.unpack_from(handle)
        assert pid != os.getpid(), "a process cannot open its own handle"
        try:
            own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        except OSError:
            raise CudaError("cuIpcOpenMemHandle", 201, "CUDA_ERROR_INVALID_CONTEXT") from None
        memory = mmap.mmap(own, size)
        os.close(own)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.opened[address] = memory
        return address

    def close(self, address: int) -> None:
        del self.opened[address]

    def load(self, ptx: bytes) -> int:
        assert b".entry combine_float32(" in ptx
        return next(self._numbers)

    def function(self, module: int, name: str) -> str:
        return name

    def prepare_launch(self, function: str, grid: tuple[int, int], threads: int, parameter: bytes) -> Any:
        return lambda stream: self.launch(function, grid, threads, parameter)

    def launch(self, function: str, grid: tuple[int, int], threads: int, parameter: bytes) -> None:
        self.on_launch()
        self.calls.append(function)
        pieces, op, divisor = unpack(parameter, grid[1])
        dtype = function.removeprefix("combine_")
        storage = np.dtype(np.uint16 if dtype == "bfloat16" else dtype)
        per_block = threads * (16 // storage.itemsize)
        assert grid[0] * per_block >= max(piece.elements for piece in pieces)
        assert dtype in _DTYPES
        time.sleep(self.kernel_seconds)
        for piece in pieces:
            arrays = [_at(address, piece.elements, storage) for address in piece.inputs]
            name = dtype if dtype == "bfloat16" else None
            total = arrays[0].copy()
            if divisor != 1 and dtype == "float16":  # rounded once, when it is divided
                arrays = [array.astype(np.float32) for array in arrays]
                total = arrays[0]
            for other in arrays[1:]:
                reduce_into(total, other, _OPS[op], dtype=name)
            if divisor != 1:
                divide_in_place(total, int(divisor), dtype=name)
            for address in piece.outputs:
                _at(address, piece.elements, storage)[:] = total


def _at(address: int, count: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    return np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype)


class DriverArray:
    """An array in the memory of the driver's GPU, with the CUDA array interface. Also for a real driver."""

    def __init__(self, values: Any, *, stream: int | None = None, at: int | None = None) -> None:
        values = np.ascontiguousarray(values)
        self.shape, self.dtype, self.stream = values.shape, values.dtype, stream
        self._driver = driver_module.driver()
        with self._driver.using(0):
            self.address = self._driver.allocate(values.nbytes) if at is None else at
        self.read_only = False
        self.fill(values)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, self.read_only),
            "version": 3,
            "strides": None,
            "stream": self.stream,
        }

    def fill(self, values: Any) -> None:
        """Gives it other values."""
        values = np.ascontiguousarray(np.broadcast_to(values, self.shape), self.dtype)
        with self._driver.using(0):
            self._driver.copy_to_device(self.address, values.__array_interface__["data"][0], values.nbytes, 0)
            while not self._driver.is_idle(0):
                pass

    def numpy(self) -> np.ndarray[Any, Any]:
        """Its values."""
        values = np.empty(self.shape, self.dtype)
        with self._driver.using(0):
            self._driver.copy_to_host(values.__array_interface__["data"][0], self.address, values.nbytes, 0)
            while not self._driver.is_idle(0):
                pass
        return values


def install(**options: Any) -> FakeDriver:
    """Puts the stand-in in the driver's place, in this process."""
    pace.SLICE = 60.0  # its kernels take as long as this machine lets them, which says nothing of a GPU
    made = FakeDriver(**options)
    driver_module.use_driver(made)
    return made
