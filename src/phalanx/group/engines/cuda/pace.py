"""Whether the GPU is busy with the ranks' own kernels, as seen by how long the executor's took to run.

All ranks hear the same times from the executor, in the outcome of each operation, so all come to the same answer.
"""

from __future__ import annotations

__all__ = ["Pace"]

SLICE = 1e-3
"""Seconds that a kernel takes at least if it had to wait for the time slices of other processes."""
BYTES_PER_SECOND = 1e12
"""The least that a kernel moves, on any GPU that is not busy."""
FIRST, LONGEST = 4, 256
"""Operations for which the answer holds; twice as many each time that it was right. Then the executor tries again."""


class Pace:
    """The last kernels, and what follows from them."""

    def __init__(self) -> None:
        self._left = 0
        self._next = FIRST

    @property
    def busy(self) -> bool:
        """True if a short operation had better not wait for a kernel."""
        return self._left > 0

    def executed(self, size: int, seconds: float) -> None:
        """A kernel that moved about so many bytes has taken so long."""
        if seconds > SLICE + size / BYTES_PER_SECOND:
            self._left, self._next = self._next, min(2 * self._next, LONGEST)
        else:
            self._next = FIRST

    def staged(self) -> None:
        """An operation went another way, because the GPU was busy."""
        self._left -= 1
