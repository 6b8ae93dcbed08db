"""A message of more than two GiB: past every 31-bit limit on the way, and past what one system call moves."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .check import check

GIB = 1 << 30
SIZE = 2 * GIB + (65 << 20) + 5
TIME = 100.0


def _marks() -> npt.NDArray[np.int64]:
    around = [0, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, SIZE - 1]
    return np.unique(np.array([*around, *range(12_345, SIZE, (64 << 20) + 7)], np.int64))


@check(ranks=2, large=True)
def more_than_two_gib(backend: Any) -> None:
    """A message of more than 2 GiB arrives intact."""
    marks = _marks()
    values = (marks % 251 + 1).astype(np.uint8)
    if backend.rank == 0:
        # Zero pages that are never written cost no memory on the sender's side.
        data = np.zeros(SIZE, np.uint8)
        data[marks] = values
        backend.send(data, 1, timeout=TIME)
        backend.send(b"after", 1)
        backend.recv(bytearray(1), 1, timeout=TIME)
        return
    target = np.empty(SIZE, np.uint8)
    backend.recv(target, 0, timeout=TIME)
    assert (target[marks] == values).all()
    assert np.count_nonzero(target) == len(marks)
    after = bytearray(5)
    backend.recv(after, 0)
    assert after == b"after"
    backend.send(b"k", 0)
