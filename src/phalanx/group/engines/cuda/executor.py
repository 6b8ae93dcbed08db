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

import functools
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...._native import op_code
from ....cuda.arrays import DeviceArray
from ....cuda.driver import CudaDriver, CudaError
from ....cuda.kernels.loaded import Kernels, kernels_of
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

__all__ = ["EXECUTOR", "Executor", "Plan"]

EXECUTOR = 0
"""The rank whose kernel it is."""
Plan = Callable[[Sequence[int], Sequence[int]], list[Piece]]
"""Makes the pieces of an operation from the addresses of everybody's sources and targets."""
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
        self._kernels: Kernels | None = None
        self._stream = 0
        self.pace = Pace()

    def run(
        self,
        running: RunningCollective,
        source: DeviceArray,
        target: DeviceArray | None,
        plan: Plan,
        reduction: Reduction | None = None,
    ) -> bool:
        """Does an operation; False if it cannot be done so, on all ranks alike, and nothing has happened.

        Args:
            target: None if this rank has none, or it is the source.
            reduction: None if elements are only moved.

        Raises:
            DeadlinePassed, FingerprintMismatch, PhalanxError: As every engine.
        """
        arrays = [source, source if target is None else target]
        for array in arrays:
            if not array.ready.wait(running.deadline):
                raise DeadlinePassed([self._host.rank])
        mine = self._reference(source).pack()
        mine += mine if target is None else self._reference(target).pack()
        try:
            size, length = self._host.size, len(mine)
            table = np.empty(size * length, np.uint8)
            self._host.all_gather(running, np.frombuffer(mine, np.uint8), table, [length] * size)
            outcome = np.empty(_OUTCOME.size, np.uint8)
            if self._host.rank == EXECUTOR:
                words = self._execute(running, arrays, _references(table.tobytes(), size), plan, reduction)
                outcome[:] = np.frombuffer(words, np.uint8)
            self._host.broadcast(running, outcome, EXECUTOR)
        except BaseException:
            self._flight.give_up()
            raise
        code, seconds = _OUTCOME.unpack(outcome.tobytes())
        if code == _DONE:
            self.pace.executed(source.nbytes, seconds)
        return bool(code == _DONE)

    def _reference(self, array: DeviceArray) -> MemoryReference:
        if array.device != self._device:
            return MemoryReference()
        if not array.nbytes:
            return MemoryReference(size=1)  # there is nothing to open
        return self._exports.reference(array)

    def _execute(
        self,
        running: RunningCollective,
        arrays: Sequence[DeviceArray],
        told: Sequence[Sequence[MemoryReference]],
        plan: Plan,
        reduction: Reduction | None,
    ) -> bytes:
        """Launches the kernel and waits for its end. Returns the outcome."""
        if not all(reference.size for references in told for reference in references):
            return _OUTCOME.pack(_CANNOT, 0.0)
        with self._driver.using(self._device):
            try:
                columns = [
                    [self._address(rank, references[i], arrays[i]) for rank, references in enumerate(told)]
                    for i in range(len(arrays))
                ]
                if self._kernels is None:
                    self._kernels = kernels_of(self._driver, self._device)
                    self._stream = self._driver.new_stream()
            except CudaError:  # it cannot open their memory: another container, or a driver that forbids it
                return _OUTCOME.pack(_CANNOT, 0.0)
            with self._flight.kernel():
                began = time.monotonic()
                self._launch(self._kernels, plan(*columns), arrays[0], reduction)
                late = Deadline(running.deadline.remaining() + KERNEL_WAIT)
                in_time = wait_for_stream(self._driver, self._stream, late)
                seconds = time.monotonic() - began
        if not in_time:
            raise DeadlinePassed([EXECUTOR])
        return _OUTCOME.pack(_DONE, seconds)

    def _address(self, rank: int, reference: MemoryReference, own: DeviceArray) -> int:
        if rank == EXECUTOR:
            return own.address
        return self._imports.address(rank, reference) if reference.handle.strip(b"\0") else 0

    def _launch(self, kernels: Kernels, pieces: list[Piece], like: DeviceArray, reduction: Reduction | None) -> None:
        if reduction is None:
            dtype, width, wider = moves(pieces, like.itemsize)
            kernels.combine(dtype, width, wider, 0, 1.0, self._stream)
            return
        divisor = float(self._host.size) if reduction.name == "mean" else 1.0
        dtype = reduction.dtype or _name_of(like.dtype)
        kernels.combine(dtype, like.itemsize, pieces, op_code(reduction.step), divisor, self._stream)

    def close(self) -> None:
        """Gives back what it holds."""
        self._imports.close()
        if self._stream:
            with self._driver.using(self._device):
                self._driver.end_stream(self._stream)
            self._stream = 0
        self._flight.close()


def _references(table: bytes, size: int) -> list[list[MemoryReference]]:
    """The references to each rank's source and target."""
    found = [MemoryReference.unpack(table[at : at + REFERENCE_BYTES]) for at in range(0, len(table), REFERENCE_BYTES)]
    return [found[2 * rank : 2 * rank + 2] for rank in range(size)]


@functools.lru_cache
def _name_of(dtype: np.dtype[Any]) -> str:
    return str(dtype.name)  # which NumPy puts together each time
