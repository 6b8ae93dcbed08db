"""How late each rank was, from the first operation of a job to the last, in little memory. No I/O."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["LatenessTable"]

MOST = 4096
"""Parts that are kept; of a job of days, two parts become one."""
LEAST = 300e-6
"""Seconds; what is less is the scheduler's doing."""

Seconds = npt.NDArray[np.float64]


class LatenessTable:
    """The seconds by which each rank was late, in parts of equally many operations: one, as long as they are few.

    Args:
        size: Ranks of the job.
    """

    def __init__(self, size: int) -> None:
        self._parts: list[Seconds] = []
        self._size = size
        self._length = 1
        self._rest = np.zeros((0, size))

    def add(self, late: Seconds, scale: float = 1.0) -> None:
        """Adds operations: one for each row, with a column for each rank.

        Args:
            scale: How many each of them stands for, where some were not seen.
        """
        rows = np.concatenate([self._rest, np.where(late >= LEAST, late * scale, 0.0)])
        whole = len(rows) // self._length * self._length
        self._rest = rows[whole:]
        self._parts.extend(rows[:whole].reshape(-1, self._length, self._size).sum(axis=1))
        while len(self._parts) > MOST:
            odd = self._parts[len(self._parts) // 2 * 2 :]
            self._parts = [a + b for a, b in zip(self._parts[::2], self._parts[1::2], strict=False)] + odd
            self._length *= 2

    @property
    def parts(self) -> Seconds:
        """A row for each part that is whole."""
        return np.stack(self._parts) if self._parts else np.zeros((0, self._size))
