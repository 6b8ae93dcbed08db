"""Memory of a GPU that another process may open: a reference to it, who gives one, and who opens it.

An allocation has a handle, by which other processes open it as a whole; an array is a place in it. Its buffer id tells
it from another one that came to lie at the same address later.
"""

from __future__ import annotations

import contextlib
import struct
from typing import NamedTuple

from .arrays import DeviceArray
from .driver import HANDLE_BYTES, CudaDriver, CudaError

__all__ = ["Exports", "Imports", "MemoryReference"]

_REFERENCE = struct.Struct(f"<QQQQ{HANDLE_BYTES}s")
REFERENCE_BYTES = _REFERENCE.size
KEPT = 4096
"""References to arrays that are kept packed."""


class MemoryReference(NamedTuple):
    """A place in memory of a GPU, for another process. One without a size cannot be opened."""

    buffer_id: int = 0
    base: int = 0
    """Where the allocation begins in the process that it belongs to."""
    size: int = 0
    offset: int = 0
    handle: bytes = b""

    def pack(self) -> bytes:
        """As many bytes for each."""
        return _REFERENCE.pack(*self)

    @classmethod
    def unpack(cls, data: bytes) -> MemoryReference:
        """The reverse."""
        return cls(*_REFERENCE.unpack(data))


class Exports:
    """The references that this process gives. Each allocation is exported once."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._known: dict[int, MemoryReference] = {}
        """A reference to each allocation, by its buffer id."""
        self._packed: dict[tuple[int, int], bytes] = {}
        """Those to arrays, by buffer id and address."""

    def reference(self, array: DeviceArray) -> bytes:
        """A reference to an array, packed; one without a size if other processes cannot open its memory."""
        number = self._driver.buffer_id(array.address)
        packed = self._packed.get((number, array.address))
        if packed is None:
            if len(self._packed) > KEPT:
                self._packed.clear()
            packed = self._packed[number, array.address] = self._reference(number, array).pack()
        return packed

    def _reference(self, number: int, array: DeviceArray) -> MemoryReference:
        whole = self._known.get(number)
        if whole is None:
            whole = self._known[number] = self._export(array)
        return whole._replace(offset=array.address - whole.base) if whole.size else whole

    def _export(self, array: DeviceArray) -> MemoryReference:
        """A reference to the whole allocation of an array."""
        with contextlib.suppress(CudaError), self._driver.using(array.device):
            memory = self._driver.memory_at(array.address)
            if memory.can_export:
                handle = self._driver.export(memory.base)
                return MemoryReference(memory.buffer_id, memory.base, memory.size, 0, handle)
        return MemoryReference()


class Imports:
    """The memory of other processes that this one has opened, each once."""

    def __init__(self, driver: CudaDriver, device: int) -> None:
        self._driver = driver
        self._device = device
        self._opened: dict[tuple[int, int], tuple[MemoryReference, int]] = {}
        """By rank and buffer id: the reference by which it was opened, and its address here."""

    def has(self, rank: int, reference: MemoryReference) -> bool:
        """True if the memory is open already."""
        return (rank, reference.buffer_id) in self._opened

    def address(self, rank: int, reference: MemoryReference) -> int:
        """The address here of what a rank refers to. The GPU is the current one.

        Raises:
            CudaError: It cannot be opened.
        """
        key = rank, reference.buffer_id
        found = self._opened.get(key)
        if found is None:
            self._close_replaced(rank, reference)
            found = self._opened[key] = reference, self._driver.open(reference.handle)
        return found[1] + reference.offset

    def _close_replaced(self, rank: int, by: MemoryReference) -> None:
        """Closes memory of a rank where now other memory lies: it was freed there, and stays as long as it is open."""
        for key, (known, address) in list(self._opened.items()):
            if key[0] == rank and known.base < by.base + by.size and by.base < known.base + known.size:
                del self._opened[key]
                with contextlib.suppress(CudaError):
                    self._driver.close(address)

    def close(self) -> None:
        """Closes all of it."""
        while self._opened:
            _, (_, address) = self._opened.popitem()
            with contextlib.suppress(CudaError), self._driver.using(self._device):
                self._driver.close(address)
