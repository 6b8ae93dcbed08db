"""Where in memory torch keeps the fields of its options, so that the core need not ask for each of them by its name.

To ask a class of pybind11 for three fields takes longer than a short collective does. The places differ from one
release of torch to another, so they are found by trial: fields are set, and the memory of the object is looked at. It
is read by the kernel, which refuses what is no memory. A class whose fields are not found for certain is asked by name.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from datetime import timedelta
from typing import Any, BinaryIO

import torch.distributed as dist

from ..operating_system import PROC

__all__ = ["places_of"]

_MEMORY = f"{PROC}/self/mem"
_POINTER = 8
_LONGEST = 128
"""Bytes of an options object that are looked at."""
_NUMBERS = (0x0102_0304_05, 0x0203_0405_06, 7)
"""Values of fields that are unlikely to stand in memory by chance."""
_UNSET = timedelta(milliseconds=-1)
"""The timeout of a call that has none of its own, as the core knows it."""
_NAMES = ("asyncOp", "timeout", "reduceOp", "rootRank")


def places_of(kind: type, *, has_op: bool, has_root: bool) -> list[int]:
    """The places of a class's fields, or an empty list if they are not known.

    Returns:
        Where an object has the address of the fields; and counted from there `asyncOp` (a byte), `timeout`
        (milliseconds, 64 bits), `reduceOp` (a byte, its number) and `rootRank` (64 bits), or -1 for one that the class
        does not have.
    """
    if sys.byteorder != "little" or sys.maxsize < 1 << 32 or kind().timeout != _UNSET:
        return []
    try:
        with closing(open(_MEMORY, "rb", buffering=0)) as memory:
            return _find(memory, kind, has_op=has_op, has_root=has_root)
    except OSError:  # there is no such file, or an address that was found is none
        return []


def _find(memory: BinaryIO, kind: type, *, has_op: bool, has_root: bool) -> list[int]:
    reductions = [dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX]
    trials: dict[str, tuple[int, list[tuple[Any, int]]]] = {
        "asyncOp": (1, [(True, 1), (False, 0), (True, 1)]),
        "timeout": (8, [(timedelta(milliseconds=number), number) for number in _NUMBERS]),
    }
    if has_op:
        trials["reduceOp"] = (1, [(dist.ReduceOp(op), hash(dist.ReduceOp(op))) for op in reductions])
    if has_root:
        trials["rootRank"] = (8, [(number, number) for number in _NUMBERS])
    places = {name: _place(memory, kind, name, *trial) for name, trial in trials.items()}
    if None in places.values():
        return []
    return [object.__basicsize__, *(-1 if (place := places.get(name, -1)) is None else place for name in _NAMES)]


def _place(memory: BinaryIO, kind: type, name: str, size: int, values: Sequence[tuple[Any, int]]) -> int | None:
    """Where a field is, in all of two objects; None if that is not certain."""
    options = [kind(), kind()]
    looks: list[tuple[bytes, int]] = []
    for value, number in values:
        for one in options:
            setattr(one, name, value)
            looks.append((_fields(memory, one), number))
    longest = min(len(seen) for seen, _ in looks)
    places = range(0, longest - size + 1, size)
    found = [at for at in places if all(_number(seen, at, size) == number for seen, number in looks)]
    return found[0] if len(found) == 1 else None


def _number(seen: bytes, at: int, size: int) -> int:
    return int.from_bytes(seen[at : at + size], "little")


def _fields(memory: BinaryIO, options: Any) -> bytes:
    """The memory behind an options object."""
    memory.seek(id(options) + object.__basicsize__)
    memory.seek(int.from_bytes(memory.read(_POINTER), "little"))
    return memory.read(_LONGEST)
