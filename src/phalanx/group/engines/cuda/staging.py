"""Arrays of a GPU in the memory of the host, for the time of one collective there.

The memory is kept and used again: it is known to the GPU's driver, so that copy engines can use it, and where the group
has a segment it lies there, so that the other ranks of the host read it where it is.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ....cuda.arrays import DeviceArray
from ....cuda.host_copies import HostCopies, host_address, host_copies
from ...outcomes import DeadlinePassed
from ...running_collective import RunningCollective

if TYPE_CHECKING:
    from ...._core import Segment

__all__ = ["Staging"]

PAGE = 4096
SMALLEST = 64 << 10
LARGEST = 64 << 20
"""Bytes of an array up to which its memory is kept: to make larger ones known takes little beside the copy."""


class Block(NamedTuple):
    """Memory of the host."""

    memory: npt.NDArray[np.uint8]
    address: int


class Staging:
    """The memory of one rank for this.

    Args:
        rank: This rank in the group.
        segment: The memory that the ranks share, if they do.
    """

    def __init__(self, rank: int, segment: Segment | None) -> None:
        self._rank = rank
        self._segment = segment
        self._free: defaultdict[int, list[Block]] = defaultdict(list)
        self._known: list[tuple[HostCopies, int]] = []
        """Addresses that the driver knows."""

    def load(self, running: RunningCollective, array: DeviceArray) -> Staged:
        """An array on the host, with its values.

        Raises:
            DeadlinePassed: It was not computed in time.
        """
        staged = self.empty(array)
        if not host_copies(array.device).load(array, staged.address, running.deadline):
            raise DeadlinePassed([self._rank])
        return staged

    def empty(self, array: DeviceArray) -> Staged:
        """The same without its values."""
        return Staged(self, array, self._take(array.nbytes, array.device))

    def store(self, running: RunningCollective, staged: Staged) -> None:
        """Brings the array up to date.

        Raises:
            DeadlinePassed: The GPU was not done in time.
        """
        if not host_copies(staged.array.device).store(staged.address, staged.array, running.deadline):
            raise DeadlinePassed([self._rank])

    def close(self) -> None:
        """Gives it all back."""
        for known, address in self._known:
            with known.driver.using(known.device):
                known.driver.unregister(address)
        self._known.clear()
        self._free.clear()

    def _take(self, size: int, device: int) -> Block:
        wanted = max(SMALLEST, 1 << (size - 1).bit_length() if size else 0)
        if wanted > LARGEST:
            memory = np.empty(size, np.uint8)
            return Block(memory, host_address(memory))
        free = self._free[wanted]
        return free.pop() if free else self._make(wanted, device)

    def _give(self, block: Block) -> None:
        if block.memory.size in self._free:
            self._free[block.memory.size].append(block)

    def _make(self, size: int, device: int) -> Block:
        memory: Any = None if self._segment is None else self._segment.empty(size + PAGE)
        if memory is None:
            memory = np.empty(size + PAGE, np.uint8)
        address = host_address(memory)
        start = -address % PAGE  # whole pages, which no other block has a part of
        known = host_copies(device)
        with known.driver.using(device):
            if known.driver.register(address + start, size):
                self._known.append((known, address + start))
        return Block(memory[start : start + size], address + start)


class Staged:
    """An array on the host that stands for one on a GPU. Its memory goes back when the object does."""

    __slots__ = ("_block", "_staging", "address", "array", "flat")

    def __init__(self, staging: Staging, array: DeviceArray, block: Block) -> None:
        self._staging = staging
        self._block = block
        self.array = array
        self.address = block.address
        self.flat: npt.NDArray[Any] = block.memory[: array.nbytes].view(array.dtype)

    def __del__(self) -> None:
        self._staging._give(self._block)
