"""Which way a collective on arrays of a GPU goes. A table, and nothing else: all ranks come to the same answer.

Figures of an H200, driver 580, without MPS, float32, two ranks:

- Through the memory of the host a short array takes 21 µs, by copy engines, which need no time slice of the GPU. The
  kernel takes 16 µs if the GPU is idle, but 4,500 if the ranks compute: each process has its time slices.
- From 64 KiB on the kernel is quicker by far if it may run: 271 µs for 256 MiB, of which 259 are the memory's.
- While the ranks compute, both are equal at 16 MiB.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

__all__ = ["Path", "Placement", "choose"]

SHORT = 64 << 10
"""Bytes up to which an array goes through the memory of the host, whatever the GPU does."""
SHORT_IF_BUSY = 16 << 20
"""The same while the ranks' own kernels keep the GPU busy."""


class Path(enum.Enum):
    """A way that an operation goes."""

    STAGED = "through the memory of the host"
    EXECUTOR = "by one kernel of the rank that leads the GPU"


class Placement(NamedTuple):
    """Where the ranks of a group are, as far as it matters here."""

    one_gpu: bool
    """True if all ranks use the same GPU and one of them can open the memory of all others."""
    reason: str = ""
    """Why not."""


EXECUTED = frozenset({"all_reduce", "reduce", "broadcast", "all_gather", "gather", "reduce_scatter", "all_to_all"})
"""The operations that have a kernel. The ranks of a scatter do not know beforehand how much there is to come."""


def choose(operation: str, size: int, placement: Placement, *, busy: bool) -> Path:
    """The way of an operation.

    Args:
        operation: An engine's method.
        size: Bytes of the largest array of a rank; all ranks know it.
        busy: True if the ranks have found the GPU busy with other kernels.
    """
    if not placement.one_gpu or operation not in EXECUTED:
        return Path.STAGED
    if size <= (SHORT_IF_BUSY if busy else SHORT):
        return Path.STAGED
    return Path.EXECUTOR
