"""The short way for arrays that are arguments, keywords or results themselves, which most long messages are.

The codec walks a message and describes each array anew. Here the words for an array of one dtype and shape are kept,
and those that came are looked up. An array inside a list or an object, and all that is not as it should be, goes the
general way, which says what is wrong. Both ways write the same bytes, and read the same arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ..errors import ProtocolError
from ..wire import dtypes
from ..wire.packing import ALIGN, INLINE, SIMPLE, Code, pack

__all__ = ["ArrayPart", "allocate", "find_arrays", "put_arrays", "read_words"]

_Ext = msgspec.msgpack.Ext
_DTYPES = {np.dtype(char).str: np.dtype(char) for char in "bBhHiIqQefd"}
"""Dtypes whose every value is valid, by their descriptions."""
_KNOWN = frozenset(_DTYPES.values())
_PADDING = memoryview(bytes(ALIGN))
_LONGEST_WORDS = 128
_array = msgspec.msgpack.Decoder(tuple[int, tuple[int, ...], str, bool]).decode

read_words = msgspec.msgpack.Decoder().decode
"""Reads a head, with the words for its arrays where they are."""


class ArrayPart(NamedTuple):
    """One array of a message that is read, and its place."""

    holder: Any
    key: Any
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int

    def place(self, target: memoryview) -> None:
        """Puts the array, which is a view of the target, where the words for it are."""
        self.holder[self.key] = np.ndarray(self.shape, self.dtype, target, self.offset)


# -- writing ---------------------------------------------------------------------------------------------------------


def put_arrays(values: Iterable[Any], buffers: list[memoryview]) -> list[Any] | None:
    """The values as a head names them, and the memory of their arrays behind that in `buffers`.

    None if one of them is neither plain nor an array of the common kinds; then `buffers` is of no use.
    """
    words: list[Any] = []
    for value in values:
        kind = type(value)
        if kind in SIMPLE or (kind is bytes and len(value) <= INLINE):
            words.append(value)
            continue
        if kind is not np.ndarray:
            return None
        dtype, shape = value.dtype, value.shape
        if dtype not in _KNOWN or not shape or not value.size or not value.flags.c_contiguous:
            return None
        gap = -sum(map(len, buffers)) % ALIGN if buffers else 0
        if gap:
            buffers.append(_PADDING[:gap])
        buffers.append(value.data.cast("B"))
        words.append(_words_for(dtype, shape))
    return words


@functools.lru_cache(maxsize=256)
def _words_for(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    nbytes = dtypes.count_bytes(shape, dtype.itemsize)
    return _Ext(Code.ARRAY, pack((nbytes, shape, dtypes.describe_dtype(dtype), False)))


# -- reading ---------------------------------------------------------------------------------------------------------


def find_arrays(holder: Any, items: Iterable[tuple[Any, Any]], parts: list[ArrayPart], offset: int) -> int:
    """Adds the arrays among the items (key and value) of a list or dict to `parts`; returns where the last one ends.

    -1 if there is something that only the general way reads.
    """
    for key, value in items:
        kind = type(value)
        if kind in SIMPLE or kind is bytes:
            continue
        if kind is not _Ext or value.code != Code.ARRAY or len(value.data) > _LONGEST_WORDS:
            return -1
        nbytes, shape, dtype = _read_array(bytes(value.data))
        if dtype is None:
            return -1
        offset += -offset % ALIGN
        parts.append(ArrayPart(holder, key, shape, dtype, offset))
        offset += nbytes
    return offset


@functools.lru_cache(maxsize=256)
def _read_array(words: bytes) -> tuple[int, tuple[int, ...], np.dtype[Any] | None]:
    """Bytes, shape and dtype of an array, if the words for it are right and it is of a common kind."""
    try:
        nbytes, shape, description, fortran = _array(words)
        dtype = _DTYPES.get(description)
        if dtype is not None and not fortran and 0 < nbytes == dtypes.count_bytes(shape, dtype.itemsize):
            return nbytes, shape, dtype
    except (msgspec.MsgspecError, ValueError, ProtocolError):
        pass  # the general way will say so
    return 0, (), None


def allocate(payload_bytes: int) -> memoryview:
    """So many writable bytes, which begin at a multiple of 64."""
    memory = np.empty(payload_bytes + ALIGN, np.uint8)
    start = -memory.__array_interface__["data"][0] % ALIGN
    return memory[start : start + payload_bytes].data
