"""The slot of a scatter: how long a part is, its dtype and its description, which the root tells everybody first.

Over TCP a short message costs by its cache lines. Very short parts lie in the slot themselves, those of all ranks.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...errors import ProtocolError
from ..tracking.fingerprint import kind_of

__all__ = ["ROOM_FOR_PARTS", "SLOT", "Parts", "Slot", "pack_slot"]

Flat = npt.NDArray[Any]

SLOT = 128
ROOM_FOR_WORDS = 56
"""Bytes of a description that lies in the slot. A longer one, of an array of many dims, follows it."""
MOST_WORDS = 4096
ROOM_FOR_PARTS = 48
"""Bytes up to which all parts together lie in the slot, at its end."""
_HEAD = struct.Struct("<QQQ")
"""The bytes of a part, a number for its dtype, and the length of its description, which follows.

`PartsHead` in cpp/bindings/fast_steps.cpp is the same, and so are the numbers above.
"""


class Parts(NamedTuple):
    """The array of the root of a scatter: equal parts, one after another."""

    flat: Flat
    dtype: str
    """As it is called in a description."""
    description: bytes
    """The packed description of one part."""


class Slot:
    """The contents of a slot.

    Args:
        size: How many parts there are.

    Raises:
        ProtocolError: It says what no root says.
    """

    def __init__(self, slot: Flat, size: int) -> None:
        self._bytes = slot.tobytes()
        self._part, _, self.words_length = _HEAD.unpack_from(self._bytes)
        if self.words_length > MOST_WORDS:
            raise ProtocolError(f"a description of {self.words_length} bytes (expected at most {MOST_WORDS})")
        self.parts_inside = self._part * size <= ROOM_FOR_PARTS
        """Whether the parts lie in the slot themselves."""

    @property
    def words(self) -> bytes | None:
        """The packed description of a part; None if it follows, with `words_length` bytes."""
        if self.words_length > ROOM_FOR_WORDS:
            return None
        return self._bytes[_HEAD.size : _HEAD.size + self.words_length]

    def part_of(self, rank: int) -> npt.NDArray[np.uint8]:
        """The part of a rank, if it lies in the slot."""
        return np.frombuffer(self._bytes, np.uint8, self._part, SLOT - ROOM_FOR_PARTS + rank * self._part)


def pack_slot(parts: Parts, size: int) -> npt.NDArray[np.uint8]:
    """The slot in which the root tells of its `size` parts."""
    slot = np.zeros(SLOT, np.uint8)
    length = len(parts.description)
    words = _HEAD.pack(parts.flat.nbytes // size, kind_of("scatter", parts.dtype, ""), length)
    if length <= ROOM_FOR_WORDS:
        words += parts.description
    slot[: len(words)] = np.frombuffer(words, np.uint8)
    if parts.flat.nbytes <= ROOM_FOR_PARTS:
        slot[SLOT - ROOM_FOR_PARTS :][: parts.flat.nbytes] = parts.flat.view(np.uint8)
    return slot
