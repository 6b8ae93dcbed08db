"""Short arrays that travel in the head of a message itself, with the words for them.

An array is mostly sent behind the head, from where it lies to where it is to lie. That is a frame with a payload, for
which the receiver plans and allocates first. A short one is copied into the head instead: to do so costs less, and the
frame goes the short way of a message without arrays.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import numpy as np

from ..errors import ProtocolError
from . import dtypes
from .packing import Code, allocate, pack

__all__ = ["COMMON", "NEAR", "array_near", "read_array_words", "read_near"]

NEAR = 48 << 10
"""Bytes of all arrays of a message up to which they are in its head."""
COMMON = {description: np.dtype(description) for description in (np.dtype(char).str for char in "bBhHiIqQefd")}
"""Dtypes whose every value is valid, by their descriptions, which name the types that users know: not `longlong`."""

_array = msgspec.msgpack.Decoder(tuple[int, tuple[int, ...], str, bool]).decode


def array_near(array: np.ndarray[Any, Any]) -> msgspec.msgpack.Ext:
    """The words for a contiguous array of a common dtype, and a copy of what it holds."""
    return msgspec.msgpack.Ext(Code.NEAR_ARRAY, b"".join((_words_before(array.dtype, array.shape), array.data)))


def read_near(data: memoryview) -> np.ndarray[Any, Any] | None:
    """The array, with memory of its own as `allocate` gives it; None if it is not as `array_near` writes it."""
    begin = 1 + data[0] if data else 0
    nbytes, shape, dtype = read_array_words(bytes(data[1:begin]))
    if dtype is None or len(data) != begin + nbytes:
        return None
    memory = allocate(nbytes)
    memory[:] = data[begin:]
    array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, memory)
    return array


@functools.lru_cache(maxsize=256)
def _words_before(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    words = pack((dtypes.count_bytes(shape, dtype.itemsize), shape, dtypes.describe_dtype(dtype), False))
    return bytes([len(words)]) + words  # 64 dimensions of few elements, the most that there are, take less than a byte


@functools.lru_cache(maxsize=256)
def read_array_words(words: bytes) -> tuple[int, tuple[int, ...], np.dtype[Any] | None]:
    """Bytes, shape and dtype of an array, if the words for it are right and it is of a common kind; else no dtype."""
    try:
        nbytes, shape, description, fortran = _array(words)
        dtype = COMMON.get(description)
        if dtype is not None and not fortran and 0 < nbytes == dtypes.count_bytes(shape, dtype.itemsize):
            return nbytes, shape, dtype
    except (msgspec.MsgspecError, ValueError, ProtocolError):
        pass  # the general way will say so
    return 0, (), None
