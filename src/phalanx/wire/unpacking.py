"""The reading half of the object codec. What another rank sent is checked here before it is believed."""

from __future__ import annotations

import datetime as dt
import decimal
import pickle
import struct
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from phalanx.errors import PhalanxError, ProtocolError, UsageError
from phalanx.exception_text import describe

from . import dtypes
from .near_arrays import read_near
from .packing import ALIGN, COMPLEX, Blob, Code, Limits

__all__ = ["HeadReader", "Part", "check_depth", "read_plain"]

_unpack = msgspec.msgpack.decode
_array = msgspec.msgpack.Decoder(tuple[int, tuple[int, ...], Any, bool]).decode
_tensor = msgspec.msgpack.Decoder(tuple[int, tuple[int, ...], str, bool]).decode
_blob = msgspec.msgpack.Decoder(tuple[int, int]).decode
_scalar = msgspec.msgpack.Decoder(tuple[Any, bytes]).decode
_ints = msgspec.msgpack.Decoder(tuple[int, int, int]).decode
_moment = msgspec.msgpack.Decoder(tuple[tuple[int, ...], Any, int]).decode

_MALFORMED = (msgspec.MsgspecError, ValueError, TypeError, ArithmeticError, RecursionError, struct.error)
"""The errors of msgspec, NumPy and the standard library for values that make no sense."""
_LONGEST_NAME = 100
_CONTAINERS = frozenset({list, tuple, dict, set, frozenset, OrderedDict})
_OPENING = bytes([*range(0x80, 0xA0), *range(0xC7, 0xCA), *range(0xD4, 0xD9), *range(0xDC, 0xE0)])
"""The bytes with which a map, an array or an extension can begin."""


def _no_extension(code: int, data: memoryview) -> Any:
    raise ValueError("more than plain data")


_plain = msgspec.msgpack.Decoder(ext_hook=_no_extension).decode


def read_plain(head: bytes, max_depth: int) -> tuple[bool, Any]:
    """The object of a head without any extension, and without much that could be nested; False for all others."""
    if len(head) - len(head.translate(None, _OPENING)) > max_depth:
        return False, None
    try:
        return True, _plain(head)
    except _MALFORMED:
        return False, None


class Part(NamedTuple):
    """One buffer of the payload: where it lies, and the call that makes an array of it."""

    offset: int
    nbytes: int
    make: Callable[..., Any]
    how: tuple[Any, ...]


class _Array:
    """Stands for an array while the head is checked; like an array, it cannot be a key."""

    __hash__ = None  # type: ignore[assignment]


class _Leaf:
    """Stands for a tensor or something pickled while the head is checked; it may be a key."""


class HeadReader:
    """Reads a head: first to check it and to learn which buffers it wants, then again to put them in."""

    def __init__(self, limits: Limits) -> None:
        self.parts: list[Part] = []
        self.offset = 0
        self.pickled = False
        self.typed = ""
        """The name of a type of the sender's that the object is of or holds: of the outermost, which is read last."""
        self._limits = limits
        self._depth = 0
        self._made: Iterator[Any] | None = None

    def read(self, head: bytes, made: Iterator[Any] | None = None) -> Any:
        """The object, with what `made` yields in place of its buffers; without it, with stand-ins for them.

        Raises:
            ProtocolError: The head is malformed.
            UsageError: Something that was pickled cannot be loaded here.
        """
        self._made = made
        self._depth = 0
        try:
            return _unpack(head, ext_hook=self._extension)
        except PhalanxError:
            raise
        except RecursionError:
            raise ProtocolError("an object is nested too deeply") from None
        except _MALFORMED as error:
            raise ProtocolError(f"an object is malformed: {error}") from None

    def _extension(self, code: int, data: memoryview) -> Any:
        reader = _READERS.get(code)
        if reader is None:
            raise ProtocolError(f"an object has an extension of the unknown kind {code}")
        return reader(self, data)

    def items(self, data: memoryview) -> list[Any]:
        self._depth += 1
        if self._depth > self._limits.max_depth:
            raise ProtocolError(f"an object is nested deeper than {self._limits.max_depth} levels")
        items = _unpack(data, ext_hook=self._extension)
        self._depth -= 1
        if type(items) is not list:
            raise ProtocolError("a tuple, set or dict in an object is not a list of items")
        return items

    def pairs(self, data: memoryview) -> Iterator[tuple[Any, Any]]:
        items = self.items(data)
        if len(items) % 2:
            raise ProtocolError("a dict in an object has a key without a value")
        return zip(items[::2], items[1::2], strict=True)

    def typed_value(self, data: memoryview) -> Any:
        items = self.items(data)
        if len(items) != 2 or type(items[0]) is not str:
            raise ProtocolError("an object of a type of its own is not a name and a value")
        self.typed = items[0][:_LONGEST_NAME]
        return items[1]

    def scalar(self, data: memoryview) -> Any:
        description, raw = _scalar(data)
        dtype = dtypes.parse_dtype(description)
        if len(raw) != dtype.itemsize:
            raise ProtocolError(f"a scalar of dtype {dtype} has {len(raw)} bytes (expected {dtype.itemsize})")
        # A copy, because a structured scalar is a view: it must be writable and not hold the whole head.
        array = np.frombuffer(bytearray(raw), dtype) if raw else np.zeros(1, dtype)
        dtypes.check_values(array)
        return array[0]

    def array(self, data: memoryview) -> Any:
        if self._made is not None:  # it was checked
            return next(self._made)
        nbytes, shape, description, fortran = _array(data)
        dtype = dtypes.parse_dtype(description)
        if dtype.itemsize == 0:
            raise ProtocolError(f"an array of dtype {dtype} is not valid: its elements have no bytes")
        self._count(nbytes, shape, dtype.itemsize)
        return self._place(nbytes, _Array, _make_array, dtype, shape, fortran)

    def near_array(self, data: memoryview) -> Any:
        array = read_near(data)
        if array is None:
            raise ProtocolError("an array in the head of an object is malformed")
        return array

    def near_tensor(self, data: memoryview) -> Any:
        array = self.near_array(data)
        return dtypes.make_tensor(array.reshape(-1).view(np.uint8), array.dtype.name, array.shape, False)

    def tensor(self, data: memoryview) -> Any:
        if self._made is not None:  # it was checked
            return next(self._made)
        nbytes, shape, name, requires_grad = _tensor(data)
        itemsize = dtypes.TENSOR_ITEMSIZES.get(name)
        if itemsize is None:
            raise ProtocolError(f"a tensor of dtype {name[:40]!r} is not supported")
        if requires_grad and not name.startswith(("float", "bfloat", "complex")):
            raise ProtocolError(f"a tensor of dtype {name} cannot require a gradient")
        self._count(nbytes, shape, itemsize)
        return self._place(nbytes, _Leaf, dtypes.make_tensor, name, shape, requires_grad)

    def blob(self, data: memoryview) -> Any:
        if self._made is not None:  # it was checked
            return next(self._made)
        nbytes, kind = _blob(data)
        maker = _BLOBS.get(kind)
        if maker is None or nbytes < 0:
            raise ProtocolError(f"an object has a run of {nbytes} bytes of the unknown kind {kind}")
        self.pickled |= kind == Blob.PICKLE
        return self._place(nbytes, _Array if kind == Blob.BYTEARRAY else _Leaf, maker)

    def pickle(self, data: memoryview) -> Any:
        self.pickled = True
        return _Leaf() if self._made is None else _load_pickle(data)

    def _count(self, nbytes: int, shape: tuple[int, ...], itemsize: int) -> None:
        expected = dtypes.count_bytes(shape, itemsize)
        if nbytes != expected:
            raise ProtocolError(f"an array announces {nbytes} bytes, but its shape and dtype need {expected}")

    def _place(self, nbytes: int, stand_in: type, make: Callable[..., Any], *how: Any) -> Any:
        if len(self.parts) >= self._limits.max_arrays:
            raise ProtocolError(f"an object has more than {self._limits.max_arrays} arrays")
        if nbytes:
            self.offset += -self.offset % ALIGN
        self.parts.append(Part(self.offset, nbytes, make, how))
        self.offset += nbytes
        return stand_in()


def check_depth(head: bytes, value: Any, limit: int) -> None:
    """Refuses an object whose containers lie too deep in one another.

    Raises:
        ProtocolError: They do.
    """
    # Each level needs an opening byte. Most heads have so few that nothing needs to be looked at.
    if len(head) - len(head.translate(None, _OPENING)) <= limit:
        return
    level = [value] if type(value) in _CONTAINERS else []
    for _ in range(limit):
        below: list[Any] = []
        for container in level:
            if isinstance(container, dict):
                _add_containers(below, container.values())
            _add_containers(below, container)
        level = below
    if level:
        raise ProtocolError(f"an object is nested deeper than {limit} levels")


def _add_containers(found: list[Any], items: Any) -> None:
    if not _CONTAINERS.isdisjoint(map(type, items)):
        found.extend(item for item in items if type(item) in _CONTAINERS)


def _make_array(raw: npt.NDArray[np.uint8], dtype: np.dtype[Any], shape: tuple[int, ...], fortran: bool) -> Any:
    array = raw.view(dtype).reshape(shape, order="F" if fortran else "C")
    dtypes.check_values(array)
    return array


def _load_pickle(data: Any) -> Any:
    try:
        return pickle.loads(data)  # noqa: S301 - both sides said allow_pickle=True
    except Exception as error:  # whatever the object's own methods raise
        raise UsageError(f"a pickled object cannot be loaded here: {describe(error)}") from error


def _read_moment(kind: Callable[..., Any], fields: int, data: memoryview) -> Any:
    numbers, zone, fold = _moment(data)
    if len(numbers) != fields:
        raise ProtocolError(f"a date or time has {len(numbers)} fields (expected {fields})")
    tzinfo = None
    if zone is not None:
        offset, *label = zone
        tzinfo = dt.timezone(dt.timedelta(microseconds=offset), *label)
    return kind(*numbers, tzinfo=tzinfo, fold=fold)


_BLOBS: dict[int, Callable[..., Any]] = {
    Blob.BYTES: lambda raw: raw.tobytes(),
    Blob.BYTEARRAY: bytearray,
    Blob.PICKLE: _load_pickle,
}

_READERS: dict[int, Callable[[HeadReader, memoryview], Any]] = {
    Code.TUPLE: lambda r, data: tuple(r.items(data)),
    Code.SET: lambda r, data: set(r.items(data)),
    Code.FROZENSET: lambda r, data: frozenset(r.items(data)),
    Code.DICT: lambda r, data: dict(r.pairs(data)),
    Code.ORDERED_DICT: lambda r, data: OrderedDict(r.pairs(data)),
    Code.INT: lambda r, data: int.from_bytes(data, "little", signed=True),
    Code.STR: lambda r, data: bytes(data).decode("utf-8", "surrogatepass"),
    Code.BYTEARRAY: lambda r, data: bytearray(data),
    Code.COMPLEX: lambda r, data: complex(*COMPLEX.unpack(data)),
    Code.DATE: lambda r, data: dt.date(*_ints(data)),
    Code.TIME: lambda r, data: _read_moment(dt.time, 4, data),
    Code.DATETIME: lambda r, data: _read_moment(dt.datetime, 7, data),
    Code.TIMEDELTA: lambda r, data: dt.timedelta(*_ints(data)),
    Code.DECIMAL: lambda r, data: decimal.Decimal(bytes(data).decode("ascii")),
    Code.UUID: lambda r, data: uuid.UUID(bytes=bytes(data)),
    Code.SCALAR: HeadReader.scalar,
    Code.ARRAY: HeadReader.array,
    Code.NEAR_ARRAY: HeadReader.near_array,
    Code.NEAR_TENSOR: HeadReader.near_tensor,
    Code.TENSOR: HeadReader.tensor,
    Code.BLOB: HeadReader.blob,
    Code.PICKLE: HeadReader.pickle,
    Code.TYPED: HeadReader.typed_value,
}
