"""A stand-in for the CUDA driver whose memory of a GPU is shared memory of the host, and arrays that lie there.

Processes open each other's memory as they would a GPU's. Kernels are done by NumPy, from the same bytes that a GPU
would get. A stream does at once what is put on it, unless a test holds it back. The core calls the stand-in by the
addresses of functions that ctypes makes.
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
from typing import Any, NamedTuple

import numpy as np

from phalanx._native import _DTYPES, _OPS, divide_in_place, reduce_into
from phalanx.cuda import driver as driver_module
from phalanx.cuda.driver import _FUNCTIONS, HANDLE_BYTES, Allocation, CudaError, _Copy2D, _Handle
from phalanx.group.engines.cuda import routing

_HANDLE = struct.Struct("<QQQ")
CONTEXT = 0xC0DE
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    **_FUNCTIONS,
    "cuPointerGetAttributes": (ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64),
    "cuIpcOpenMemHandle_v2": (ctypes.c_void_p, _Handle, ctypes.c_uint),
    "cuLaunchKernel": (ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p),
}

# `Plan` in combine.cu.
POINTERS, PIECES = 320, 64
_POINTERS, _PIECE, _END = struct.Struct(f"<{POINTERS}Q"), struct.Struct("<QHHHH"), struct.Struct("<dQII")
PLAN_BYTES = _POINTERS.size + PIECES * _PIECE.size + _END.size


class Piece(NamedTuple):
    """Elements at these addresses are combined, in this order, and written to those."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    elements: int


def unpack(parameter: bytes, pieces: int) -> tuple[list[Piece], int, float, int]:
    """The first pieces of a launch, its reduction, its divisor, and the address of the word that closes it."""
    pointers = _POINTERS.unpack_from(parameter)
    found = []
    for number in range(pieces):
        count, first, inputs, outputs, aligned = _PIECE.unpack_from(parameter, _POINTERS.size + number * _PIECE.size)
        middle = first + inputs
        piece = Piece(pointers[first:middle], pointers[middle : middle + outputs], count)
        assert aligned == (not any(address % 16 for address in (*piece.inputs, *piece.outputs)))
        found.append(piece)
    divisor, closed, op, _ = _END.unpack_from(parameter, PLAN_BYTES - _END.size)
    return found, op, divisor, closed


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
        self.private: set[int] = set()
        """Allocations that cannot be given to other processes."""
        self.registered: set[int] = set()
        self.opened: dict[int, mmap.mmap] = {}
        self.busy_events: set[int] = set()
        self.held_streams: set[int] = set()
        """Streams that do nothing for now; a mark on them is not done."""
        self.capturing: set[int] = set()
        self.kernel_seconds = 0.0
        self.on_launch: Any = lambda: None
        self.reads = 0
        """Copies from the GPU."""
        self.read_sizes: list[int] = []
        """Their bytes."""
        self.copies = 0
        """Copies inside the GPU, by the core."""
        self._memory: dict[int, tuple[mmap.mmap, int, int, int]] = {}
        self._numbers = itertools.count(1)
        self._contexts = 0
        self._functions: dict[int, str] = {}
        self._callbacks: dict[str, Any] = {}

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

    def device_at(self, address: int) -> int:
        self.allocation_at(address)
        return 0

    def allocation_at(self, address: int) -> tuple[int, int, int]:
        """Where an allocation begins, its size, and its buffer id."""
        for base, (_, _, size, number) in self._memory.items():
            if base <= address < base + max(size, 1):
                return base, size, number
        raise CudaError("cuPointerGetAttributes", 1, "CUDA_ERROR_INVALID_VALUE")

    def allocation(self, address: int) -> Allocation:
        base, size, number = self.allocation_at(address)
        return Allocation(number, base, size, self.exports and base not in self.private)

    def context(self, device: int) -> int:
        assert device == 0
        return CONTEXT

    def error_of(self, function: str, code: int) -> CudaError:
        return CudaError(function, code, {700: "CUDA_ERROR_ILLEGAL_ADDRESS"}.get(code, ""))

    def address_of(self, name: str) -> int:
        """Of a function that does what the driver's would."""
        if name not in self._callbacks:
            body = getattr(self, f"_{name}")

            def call(*arguments: Any) -> int:
                try:
                    return int(body(*arguments) or 0)
                except CudaError as error:
                    return error.code

            self._callbacks[name] = ctypes.CFUNCTYPE(ctypes.c_int, *_SIGNATURES[name])(call)
        return ctypes.cast(self._callbacks[name], ctypes.c_void_p).value or 0

    def register(self, address: int, size: int) -> bool:
        assert address % mmap.PAGESIZE == 0
        assert size % mmap.PAGESIZE == 0
        self.registered.add(address)
        return True

    def unregister(self, address: int) -> None:
        self.registered.remove(address)

    def copy_to_host(self, host: int, address: int, size: int, stream: int) -> None:
        self.reads += 1
        self.read_sizes.append(size)
        if not any(start <= address < start + len(memory) for start, memory in self.opened.items()):
            self.allocation_at(address)
        ctypes.memmove(host, address, size)

    def copy_to_device(self, address: int, host: int, size: int, stream: int) -> None:
        if address not in self.opened:
            self.allocation_at(address)
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

    def function(self, module: int, name: str) -> int:
        number = next(self._numbers)
        self._functions[number] = name
        return number

    def launch(self, function: str, grid: tuple[int, int], threads: int, parameter: bytes) -> None:
        self.on_launch()
        self.calls.append(function)
        pieces, op, divisor, closed = unpack(parameter, grid[1])
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
            if _at(closed, 1, np.dtype(np.uint32))[0]:
                continue
            for address in piece.outputs:
                _at(address, piece.elements, storage)[:] = total

    # -- the functions that the core calls, under the driver's names; a code other than 0 is an error -----

    def _cuCtxGetCurrent(self, found: int) -> None:
        _put(found, ctypes.c_void_p, CONTEXT)

    def _cuCtxPushCurrent_v2(self, _context: int) -> int:
        raise AssertionError("it is the current one")

    def _cuCtxPopCurrent_v2(self, _found: int) -> int:
        raise AssertionError("it was the current one")

    def _cuPointerGetAttribute(self, found: int, attribute: int, address: int) -> None:
        assert attribute == 7
        _put(found, ctypes.c_uint64, self.allocation_at(address)[2])

    def _cuPointerGetAttributes(self, count: int, attributes: int, places: int, address: int) -> None:
        base, size, _ = self.allocation_at(address)
        can_export = self.exports and base not in self.private
        values = {2: (ctypes.c_uint, 2), 9: (ctypes.c_int, 0), 10: (ctypes.c_int, can_export)}
        values |= {11: (ctypes.c_uint64, base), 12: (ctypes.c_size_t, size)}
        for i in range(count):
            attribute = (ctypes.c_int * count).from_address(attributes)[i]
            _put((ctypes.c_uint64 * count).from_address(places)[i], *values[attribute])

    def _cuMemAlloc_v2(self, found: int, size: int) -> None:
        _put(found, ctypes.c_uint64, self.allocate(size))

    def _cuMemFree_v2(self, address: int) -> None:
        self.free(address)

    def _cuMemcpyDtoDAsync_v2(self, to: int, address: int, size: int, stream: int) -> None:
        self.copies += 1
        self.copy(to, address, size, stream)

    def _cuMemHostRegister_v2(self, address: int, size: int, _flags: int) -> int:
        return not self.register(address, size)

    def _cuMemHostUnregister(self, address: int) -> None:
        self.unregister(address)

    def _cuMemcpyDtoHAsync_v2(self, host: int, address: int, size: int, stream: int) -> None:
        self.copy_to_host(host, address, size, stream)

    def _cuMemcpyHtoDAsync_v2(self, address: int, host: int, size: int, stream: int) -> None:
        self.copy_to_device(address, host, size, stream)

    def _cuMemcpy2DAsync_v2(self, place: int, stream: int) -> None:
        copy = _Copy2D.from_address(place)
        assert copy.width == copy.src_pitch == copy.dst_pitch
        self.copy_to_device(copy.dst_device, copy.src_host, copy.width * copy.height, stream)

    def _cuStreamQuery(self, stream: int) -> int:
        return 0 if self.is_idle(stream) else 600

    def _cuStreamIsCapturing(self, stream: int, found: int) -> None:
        _put(found, ctypes.c_int, self.is_capturing(stream))

    def _cuEventRecord(self, event: int, stream: int) -> None:
        self.record(event, stream)

    def _cuEventQuery(self, event: int) -> int:
        return 0 if self.is_done(event) else 600

    def _cuIpcGetMemHandle(self, found: int, base: int) -> None:
        ctypes.memmove(found, self.export(base), HANDLE_BYTES)

    def _cuIpcOpenMemHandle_v2(self, found: int, handle: _Handle, _flags: int) -> None:
        _put(found, ctypes.c_uint64, self.open(bytes(handle)))

    def _cuIpcCloseMemHandle(self, address: int) -> None:
        self.close(address)

    def _cuLaunchKernel(self, function: int, *rest: Any) -> None:
        (x, y, z, threads, *others), (_shared, _stream, parameters, extra) = rest[:6], rest[6:]
        assert (z, *others, extra) == (1, 1, 1, None)
        parameter = ctypes.string_at(ctypes.c_void_p.from_address(parameters).value or 0, PLAN_BYTES)
        self.launch(self._functions[function], (x, y), threads, parameter)


def _put(place: int, kind: Any, value: Any) -> None:
    kind.from_address(place).value = value


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
    routing.SLICE = 60.0  # its kernels take as long as this machine lets them, which says nothing of a GPU
    made = FakeDriver(**options)
    driver_module.use_driver(made)
    return made
