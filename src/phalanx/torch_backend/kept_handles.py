"""The base class of handles that the core makes: it keeps those that nobody holds any more, to give them out again.

To make an object of torch's `Work` and to destroy it takes longer than a short collective. A handle that C++ still owns
is not kept. How many owners it has is read in memory, at a place that is found by trial, as with the fields of options.
"""

from __future__ import annotations

import sys
from contextlib import closing
from typing import Any, BinaryIO

import torch.distributed as dist

from .._native import core
from ..operating_system import PROC

__all__ = ["KeptWork"]

_POINTER = 8
_LONGEST = 64
"""Bytes of an object that are looked at."""


def _place_of_count() -> int:
    """Where an object of C++ behind a handle has the number of its owners (64 bits); -1 if that is not known."""
    if sys.byteorder != "little" or sys.maxsize < 1 << 32 or not hasattr(dist.Work, "boxed"):
        return -1
    try:
        with closing(open(f"{PROC}/self/mem", "rb", buffering=0)) as memory:
            work = dist.Work()
            owners: list[Any] = []
            looks = []
            for _ in range(4):
                looks.append(_look(memory, work))
                owners.append(work.boxed())
            owners.clear()
            looks.append(_look(memory, work))
    except (OSError, RuntimeError):  # there is no such file, an address that was found is none, or torch cannot
        return -1
    first = looks[0]
    expected = [0, 1, 2, 3, 0]
    found = [
        8 * at for at in range(len(first)) if first[at] != 0 and [look[at] - first[at] for look in looks] == expected
    ]
    return found[0] if len(found) == 1 else -1


def _look(memory: BinaryIO, work: Any) -> list[int]:
    """The memory behind a handle, in words."""
    memory.seek(id(work) + object.__basicsize__)
    memory.seek(int.from_bytes(memory.read(_POINTER), "little"))
    seen = memory.read(_LONGEST)
    return [int.from_bytes(seen[at : at + 8], "little") for at in range(0, len(seen), 8)]


def _base() -> Any:
    place = _place_of_count() if core is not None else -1
    return dist.Work if core is None or place < 0 else core.keep_handles(dist.Work, place)


KeptWork = _base()
"""torch's `Work`, or where it is possible a subclass whose objects are kept."""
