"""The short way for arrays that are arguments, keywords or results themselves, which most long messages are.

The codec walks a message and describes each array anew. Here the words for an array of one dtype and shape are kept,
and those that came are looked up. Those that are short together are in the head itself (`near_arrays`). An array inside
a list or an object, and all that is not as it should be, goes the general way, which says what is wrong, and reads the
same arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ..wire import dtypes
from ..wire.near_arrays import COMMON, read_array_words
from ..wire.packing import ALIGN, INLINE, SIMPLE, Code, pack

__all__ = ["ArrayPart", "find_arrays", "put_arrays", "read_words"]

_Ext = msgspec.msgpack.Ext
_KNOWN = frozenset(COMMON.values())
_LONGEST_WORDS = 128
_PADDING = memoryview(bytes(ALIGN))

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


def put_arrays(values: tuple[Any, ...], buffers: list[memoryview]) -> list[Any] | None:
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
        nbytes, shape, dtype = read_array_words(bytes(value.data))
        if dtype is None or dtype not in _KNOWN:
            return -1
        offset += -offset % ALIGN
        parts.append(ArrayPart(holder, key, shape, dtype, offset))
        offset += nbytes
    return offset
