"""Collectives by one kernel, among ranks that share a GPU.

1. Each rank waits until its arrays are computed.
2. All tell all where these lie: a collective of the segment, with fingerprint and deadline. A rank that is missing, or
   is in another operation, is found out here, before anything is given to the GPU.
3. Rank 0, the executor, opens the memory of the others, if it has not yet, and launches a kernel that reads all inputs
   and writes all outputs, in the order of ranks.
4. It tells the others how that went.

A rank that fails in between first makes sure that no kernel will write to its memory (`flight.py`).
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np

from ...._native import op_code
from ....cuda.arrays import DeviceArray
from ....cuda.driver import CudaDriver, CudaError
from ....cuda.kernels.loaded import kernels_of
from ....cuda.kernels.plan import Piece, moves
from ....cuda.shared import REFERENCE_BYTES, Exports, Imports, MemoryReference
from ....cuda.waiting import wait_for_stream
from ....deadline import Deadline
from ...data.reduction import Reduction
from ...outcomes import DeadlinePassed
from ...running_collective import RunningCollective
from ..base import Engine
from .flight import Flight
from .pace import Pace

__all__ = ["EXECUTOR", "Executor", "Operation"]

EXECUTOR = 0
"""The rank whose kernel it is."""
KEPT = 256
"""Operations whose launches are kept, for the next one that is the same on the same arrays."""


class Operation(NamedTuple):
    """One operation for the executor."""

    key: tuple[Hashable, ...]
    """Tells it from all others on the same arrays."""
    plan: Callable[[Sequence[int], Sequence[int]], list[Piece]]
    """Makes the pieces from the addresses of everybody's sources and targets."""


KERNEL_WAIT = 30.0
"""Seconds beyond its deadline that the executor waits for a kernel that it cannot call back."""
_DONE, _CANNOT = 1, 2
_OUTCOME = struct.Struct("<Bd")
"""How it went, and the seconds that the kernel took."""


class Executor:
    """One rank's part of this.

    Args:
        host: The engine in which the ranks meet.
        flight: See there.
    """

    def __init__(self, driver: CudaDriver, device: int, host: Engine, flight: Flight) -> None:
        self._driver = driver
        self._device = device
        self._host = host
        self._flight = flight
        self._exports = Exports(driver)
        self._imports = Imports(driver, device)
        self._prepared: dict[tuple[Hashable, ...], list[Callable[[int], None]]] = {}
        self._stream = 0
        self.pace = Pace()

    def run(
        self,
        running: RunningCollective,
        source: DeviceArray,
        target: DeviceArray | None,
        operation: Operation,
        reduction: Reduction | None = None,
    ) -> bool:
        """Does an operation; False if it cannot be done so, on all ranks alike, and nothing has happened.

        Args:
            target: None if this rank has none, or it is the source.
            reduction: None if elements are only moved.

        Raises:
            DeadlinePassed, FingerprintMismatch, PhalanxError: As every engine.
        """
        for array in (source,) if target is None else (source, target):
            if not array.ready.wait(running.deadline):
                raise DeadlinePassed([self._host.rank])
        mine = self._words(source)
        mine += mine if target is None else self._words(target)
        size, length = self._host.size, len(mine)
        table = np.empty(size * length, np.uint8)
        outcome = np.empty(_OUTCOME.size, np.uint8)
        try:
            self._host.all_gather(running, np.frombuffer(mine, np.uint8), table, [length] * size)
            if self._host.rank == EXECUTOR:
                words = self._execute(running, table.tobytes(), (source, target), operation, reduction)
                outcome[:] = np.frombuffer(words, np.uint8)
            self._host.broadcast(running, outcome, EXECUTOR)
        except BaseException:
            self._flight.give_up()
            raise
        code, seconds = _OUTCOME.unpack(outcome.tobytes())
        if code == _DONE:
            self.pace.executed(source.nbytes, seconds)
        return bool(code == _DONE)

    def _words(self, array: DeviceArray) -> bytes:
        """A reference to an array, packed."""
        if array.device != self._device:
            return MemoryReference().pack()
        if not array.nbytes:
            return MemoryReference(size=1).pack()  # there is nothing to open
        return self._exports.reference(array)

    def _execute(
        self,
        running: RunningCollective,
        table: bytes,
        own: tuple[DeviceArray, DeviceArray | None],
        operation: Operation,
        reduction: Reduction | None,
    ) -> bytes:
        """Launches the kernel and waits for its end. Returns the outcome.

        Args:
            table: The references of all ranks.
            own: The executor's own arrays.
        """
        how = (None, None) if reduction is None else (reduction.name, reduction.dtype)
        key = table, operation.key, own[0].dtype, how
        with self._driver.using(self._device):
            prepared = self._prepared.get(key)
            if prepared is None:
                prepared = self._prepare(table, own, operation, reduction)
                if prepared is None:
                    return _OUTCOME.pack(_CANNOT, 0.0)
                if len(self._prepared) > KEPT:
                    self._prepared.clear()
                self._prepared[key] = prepared
            self._flight.begin()
            try:
                began = time.monotonic()
                for launch in prepared:
                    launch(self._stream)
                late = Deadline(running.deadline.remaining() + KERNEL_WAIT)
                in_time = wait_for_stream(self._driver, self._stream, late)
                seconds = time.monotonic() - began
            finally:
                self._flight.end()
        if not in_time:
            raise DeadlinePassed([EXECUTOR])
        return _OUTCOME.pack(_DONE, seconds)

    def _prepare(
        self,
        table: bytes,
        own: tuple[DeviceArray, DeviceArray | None],
        operation: Operation,
        reduction: Reduction | None,
    ) -> list[Callable[[int], None]] | None:
        """The launches of an operation; None if the executor cannot open the memory of all."""
        found = [
            MemoryReference.unpack(table[at : at + REFERENCE_BYTES]) for at in range(0, len(table), REFERENCE_BYTES)
        ]
        if not all(reference.size for reference in found):
            return None
        source, target = own[0], own[1] or own[0]
        columns = []
        try:
            for array, references in ((source, found[::2]), (target, found[1::2])):
                columns.append([self._address(rank, one, array) for rank, one in enumerate(references)])
            kernels = kernels_of(self._driver, self._device)
            self._stream = self._stream or self._driver.new_stream()
        except CudaError:  # it cannot open their memory: another container, or a driver that forbids it
            return None
        pieces = operation.plan(*columns)
        if reduction is None:
            dtype, width, wider = moves(pieces, source.itemsize)
            return kernels.prepare(dtype, width, wider, 0, 1.0)
        divisor = float(self._host.size) if reduction.name == "mean" else 1.0
        dtype = reduction.dtype or str(source.dtype.name)
        return kernels.prepare(dtype, source.itemsize, pieces, op_code(reduction.step), divisor)

    def _address(self, rank: int, reference: MemoryReference, own: DeviceArray) -> int:
        if rank == EXECUTOR:
            return own.address
        if not reference.handle.strip(b"\0"):
            return 0  # of an array that has no elements
        if not self._imports.has(rank, reference):
            self._prepared.clear()  # what it replaces may be closed
        return self._imports.address(rank, reference)

    def close(self) -> None:
        """Gives back what it holds."""
        self._imports.close()
        if self._stream:
            with self._driver.using(self._device):
                self._driver.end_stream(self._stream)
            self._stream = 0
        self._flight.close()
