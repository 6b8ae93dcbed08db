"""Short arrays and tensors that travel in the head of a message itself, with the words for them.

An array is mostly sent behind the head, from where it lies to where it is to lie. That is a frame with a payload, for
which the receiver plans and allocates first. Where the arrays of a remote call are short, they are copied into the head
instead: to do so costs less, and the frame goes the short way of a message without arrays. The core writes such heads,
and without it nobody does; both read them.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import msgspec
import numpy as np

from .._native import core, plain_arrays
from ..errors import ProtocolError
from . import dtypes
from .packing import ALIGN, INLINE, INLINE_IN_SHORT, READ_AT_ONCE, Code, allocate

__all__ = ["COMMON", "near_array", "pack_call", "pack_value", "read_array_words", "read_near"]

COMMON = {description: np.dtype(description) for description in (np.dtype(char).str for char in "bBhHiIqQefdFD")}
"""Dtypes whose every value is valid, by their descriptions, which name the types that users know: not `longlong`."""
_TRUTH = np.dtype(bool)
_DTYPES = {**COMMON, _TRUTH.str: _TRUTH}

_array = msgspec.msgpack.Decoder(tuple[int, tuple[int, ...], str, bool]).decode


def read_near(data: memoryview) -> np.ndarray[Any, Any] | None:
    """The array, with memory of its own as `allocate` gives it; None if the words for it are wrong.

    Raises:
        ProtocolError: See `dtypes.check_values`.
    """
    begin = 1 + data[0] if data else 0
    nbytes, shape, dtype = read_array_words(bytes(data[1:begin]))
    if dtype is None or len(data) != begin + nbytes:
        return None
    memory = allocate(nbytes)
    memory[:] = data[begin:]
    array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, memory)
    dtypes.check_values(array)
    return array


@functools.lru_cache(maxsize=256)
def read_array_words(words: bytes) -> tuple[int, tuple[int, ...], np.dtype[Any] | None]:
    """Bytes, shape and dtype of an array, if the words for it are right and it is of a common kind; else no dtype.

    That may be `bool`, whose values are still to be looked at.
    """
    try:
        nbytes, shape, description, fortran = _array(words)
        dtype = _DTYPES.get(description)
        if dtype is not None and not fortran and 0 < nbytes == dtypes.count_bytes(shape, dtype.itemsize):
            return nbytes, shape, dtype
    except (msgspec.MsgspecError, ValueError, ProtocolError):
        pass  # the general way will say so
    return 0, (), None


# -- in one pass of the core -----------------------------------------------------------------------------------------


def _no_value(_value: Any, _max_depth: int) -> bytes | None:
    return None


def _no_call(_name: Any, _target: int, _seconds: float, _args: Any, _kwargs: Any, _max_depth: int) -> bytes | None:
    return None


def _read(code: int, data: memoryview) -> Any:
    array = None
    if code in (Code.NEAR_ARRAY, Code.NEAR_TENSOR):
        with contextlib.suppress(ProtocolError):
            array = read_near(data)
    if array is None:
        raise ValueError("an extension that only the general way reads")
    return array if code == Code.NEAR_ARRAY else _as_tensor(array)


def _as_tensor(array: np.ndarray[Any, Any]) -> Any:
    torch = dtypes.loaded_torch()
    if torch is None:
        raise ValueError("torch is not imported here: the general way does so")
    return torch.from_numpy(array)


pack_value, pack_call, near_array = _no_value, _no_call, _read
if core is not None:
    _packer = core.HeadPacker(INLINE, INLINE_IN_SHORT, READ_AT_ONCE, Code.NEAR_ARRAY, Code.NEAR_TENSOR, plain_arrays())
    pack_value = _packer.value
    """As `packing.pack_plain`, but arrays and tensors of a common dtype may be in a short head, too."""
    pack_call = _packer.call
    """The same of a call: name, target, seconds, arguments and keywords. None, too, if one of these is not valid."""
    _bytes = functools.partial(np.empty, dtype=np.uint8)
    near_array = core.HeadArrays(
        Code.NEAR_ARRAY, Code.NEAR_TENSOR, ALIGN, np.ndarray, _bytes, read_array_words, _as_tensor
    ).read
    """Reads an array in a head, as a hook of msgspec for extensions; ValueError for any other, and for wrong words."""
