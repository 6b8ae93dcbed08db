"""The words of the object codec, and the writing half of it. `phalanx.wire.codec` says how they are used."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import functools
import pickle
import struct
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from phalanx._native import core
from phalanx.errors import UnsupportedArray, UsageError
from phalanx.exception_text import describe

from . import dtypes

__all__ = [
    "ALIGN",
    "COMPLEX",
    "INLINE",
    "PLAIN",
    "SIMPLE",
    "Blob",
    "CannotSend",
    "Code",
    "HeadWriter",
    "Limits",
    "Structs",
    "pack",
    "pack_plain",
]

ALIGN = 64
"""Every buffer starts at a multiple of this in the payload: a cache line, what the kernels of NumPy and torch like."""
SIMPLE = frozenset({type(None), bool, int, float, str})
"""Exactly these types MessagePack gives back as they were. A container of nothing else is left to msgspec as it is."""
COMPLEX = struct.Struct("<dd")
INLINE = 16 << 10
"""Longer bytes leave the head: they are sent without a copy, and the head stays small."""
INLINE_IN_SHORT = 48 << 10
"""But not if all of the head is short all the same: a frame without a payload costs less."""
READ_AT_ONCE = 60 << 10
"""Bytes up to which a head is short: a link reads 64 KiB where it expects a frame, header and all."""

PLAIN = "None, bool, numbers, str, bytes, lists, tuples, dicts, sets, dates, arrays, tensors"
"""All that can be sent, in the words of an error message."""

Structs: TypeAlias = Literal["plain", "typed"] | None
"""How objects of a type of their own are written: as the data in them, with the type's name besides, or not at all."""

_NOT_TYPED = object()
_PADDING = memoryview(bytes(ALIGN))
_MICROSECOND = dt.timedelta(microseconds=1)
_SHOWN = 40  # characters of a key, and levels of a path, that a message repeats

pack = msgspec.msgpack.Encoder().encode
_Ext = msgspec.msgpack.Ext


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of one object, checked on both sides."""

    max_head: int = 64 << 20
    """Bytes of structure. As Python objects it can take some 80 times as much: an empty list is one byte."""
    max_payload: int = 1 << 30
    """Bytes of all arrays together."""
    max_arrays: int = 1 << 20
    """Arrays, tensors and long runs of bytes."""
    max_depth: int = 64
    """Containers inside one another."""
    raised_by: str = ""
    """How a user can allow more bytes."""


def _no_core(_value: Any, _max_depth: int) -> bytes | None:
    return None


pack_plain = _no_core if core is None else core.HeadPacker(INLINE, INLINE_IN_SHORT, READ_AT_ONCE).value
"""The head of an object that needs no extension and no buffer, in one pass of the core; None if that cannot be.

So it is for numbers, text, bytes that may be in the head, and lists and dicts of these, nested as deep as the second
argument says. The same bytes as those of a `HeadWriter`, for which long bytes leave the head even where it is short.
"""


def allocate(payload_bytes: int) -> memoryview:
    """So many writable bytes, which begin at a multiple of `ALIGN`."""
    memory = np.empty(payload_bytes + ALIGN, np.uint8)
    start = -memory.__array_interface__["data"][0] % ALIGN
    return memory[start : start + payload_bytes].data


class Code:
    """The MessagePack extensions; no enum, because msgspec wants a plain int. The numbers are the wire."""

    TUPLE = 1
    SET = 2
    FROZENSET = 3
    DICT = 4
    """Keys and values in turn: a dict with a key that MessagePack cannot hold."""
    ORDERED_DICT = 5
    INT = 6
    """Beyond 64 bits."""
    STR = 7
    """With lone surrogates, as names of files may have them."""
    BYTEARRAY = 8
    COMPLEX = 9
    DATE = 10
    TIME = 11
    DATETIME = 12
    TIMEDELTA = 13
    DECIMAL = 14
    UUID = 15
    SCALAR = 16
    """Of NumPy."""
    ARRAY = 17
    TENSOR = 18
    BLOB = 19
    PICKLE = 20
    TYPED = 21
    """A dataclass, Struct, named tuple or member of an enum: its type's name, and what it is as plain data."""
    NEAR_ARRAY = 22
    """With its bytes in the head: `near_arrays`."""
    NEAR_TENSOR = 23
    """The same of torch, without a gradient."""


class Blob:
    """The kinds of long runs of bytes outside the head."""

    BYTES = 0
    BYTEARRAY = 1
    PICKLE = 2


class CannotSend(Exception):
    """Something cannot be sent. Every container on the way out adds where it was."""

    def __init__(self, what: str, why: str, kind: type[UsageError] = UsageError) -> None:
        super().__init__(what)
        self._what = what
        self._why = why
        self._kind = kind
        self.path: list[str] = []

    def error(self) -> UsageError:
        """The error that the caller of `encode` sees."""
        steps = self.path[::-1]
        place = "$" + "".join(steps if len(steps) <= _SHOWN else [*steps[:3], "...", *steps[-3:]])
        return self._kind(f"cannot send {self._what} at {place}: {self._why}")


class _Unsupported(Exception):
    """An object that is not plain data. It is pickled, if that is allowed."""


class HeadWriter:
    """Replaces what MessagePack cannot say, and collects the buffers in the order in which the head names them.

    Args:
        simple: Types that are left alone, `SIMPLE`; without int and str, each of them is looked at.
        structs: How to write dataclasses, Structs, named tuples and members of an enum; see `codec.encode`.
    """

    def __init__(self, allow_pickle: bool, limits: Limits, simple: frozenset[type], structs: Structs = None) -> None:
        self.buffers: list[memoryview] = []
        self.offset = 0
        self.arrays = 0
        self._allow_pickle = allow_pickle
        self._max_depth = limits.max_depth
        self._simple = simple
        self._structs = structs
        self._keys = 0  # keys and sets around the value at hand: what is in them must be hashable when it arrives

    def value(self, obj: Any, depth: int = 0) -> Any:
        """The value that msgspec writes for this object.

        Raises:
            CannotSend: It cannot be sent.
        """
        kind = type(obj)
        if kind in self._simple:
            return obj
        try:
            packer = _PACKERS.get(kind)
            return packer(self, obj, depth) if packer is not None else self._other(obj, kind, depth)
        except (_Unsupported, UnsupportedArray) as unsupported:
            if self._allow_pickle:
                return self._pickle(obj)
            error_kind = UnsupportedArray if isinstance(unsupported, UnsupportedArray) else UsageError
            plain = self._structs == "plain"
            remedy = "" if plain else "; allow_pickle=True on both sides sends it, if they trust each other"
            why = f"{unsupported}{remedy}"
            raise CannotSend(f"an object of type {_name(kind)}", why, error_kind) from None

    def items(self, obj: Iterable[Any], depth: int) -> Any:
        """A list, tuple or set as something that msgspec writes as an array."""
        self._descend(depth)
        if self._simple.issuperset(map(type, obj)):
            return obj
        out: list[Any] = []
        try:
            for item in obj:
                out.append(self.value(item, depth + 1))  # noqa: PERF401 - its length says where it failed
        except CannotSend as refused:
            refused.path.append(f"[{len(out)}]" if isinstance(obj, (list, tuple)) else "{...}")
            raise
        return out

    def members(self, obj: Iterable[Any], depth: int) -> Any:
        """The items of a set."""
        self._keys += 1
        out = self.items(obj, depth)
        self._keys -= 1
        return out

    def mapping(self, obj: dict[Any, Any], depth: int) -> Any:
        """A dict as a map, or with other keys than simple ones as an extension."""
        if not self._simple.issuperset(map(type, obj)):
            return _Ext(Code.DICT, pack(self.pairs(obj, depth)))
        self._descend(depth)
        if self._simple.issuperset(map(type, obj.values())):
            return obj
        out: dict[Any, Any] = {}
        key = None
        try:
            for key, item in obj.items():
                out[key] = self.value(item, depth + 1)
        except CannotSend as refused:
            refused.path.append(f"[{_short(key)}]")
            raise
        return out

    def pairs(self, obj: dict[Any, Any], depth: int) -> list[Any]:
        """Keys and values of a dict in turn."""
        self._descend(depth)
        out: list[Any] = []
        key = None
        try:
            for key, item in obj.items():
                self._keys += 1
                out.append(self.value(key, depth + 1))
                self._keys -= 1
                out.append(self.value(item, depth + 1))
        except CannotSend as refused:
            refused.path.append(f"[{_short(key)}]" if len(out) % 2 else ".keys()")
            raise
        return out

    def _descend(self, depth: int) -> None:
        if depth >= self._max_depth:
            raise CannotSend("this object", f"it contains itself or is nested deeper than {self._max_depth} levels")

    def integer(self, obj: int, _depth: int) -> Any:
        if -(2**63) <= obj < 2**64:
            return obj
        return _Ext(Code.INT, obj.to_bytes(obj.bit_length() // 8 + 1, "little", signed=True))

    def text(self, obj: str, _depth: int) -> Any:
        try:
            obj.encode()
        except UnicodeEncodeError:
            return _Ext(Code.STR, obj.encode("utf-8", "surrogatepass"))
        return obj

    def raw(self, obj: bytes, _depth: int) -> Any:
        return obj if len(obj) <= INLINE else self._blob(Blob.BYTES, obj)

    def raw_mutable(self, obj: bytearray, _depth: int) -> Any:
        return _Ext(Code.BYTEARRAY, bytes(obj)) if len(obj) <= INLINE else self._blob(Blob.BYTEARRAY, obj)

    def array(self, obj: np.ndarray[Any, Any], _depth: int) -> Any:
        description = dtypes.describe_dtype(obj.dtype)
        if obj.dtype.itemsize == 0:
            raise UnsupportedArray(f"the elements of dtype {obj.dtype} have no bytes")
        memory, fortran = dtypes.bytes_of(obj)
        self._buffer(memory)
        return _Ext(Code.ARRAY, pack((len(memory), obj.shape, description, fortran)))

    def _record(self, obj: Any, record: _Record, depth: int) -> Any:
        """An object with named fields as a map; a Struct that wants to be an array, as one."""
        if self._keys:
            raise _Unsupported("it is a key or in a set, but would arrive as a dict, which cannot be hashed")
        self._descend(depth)
        out: dict[str, Any] = dict(record.tag)
        attribute = ""
        try:
            for name, attribute in record.fields:
                item = getattr(obj, attribute, msgspec.UNSET)
                if item is not msgspec.UNSET:
                    out[name] = self.value(item, depth + 1)
        except CannotSend as refused:
            refused.path.append(f".{attribute}")
            raise
        return list(out.values()) if record.is_array else out

    def _other(self, obj: Any, kind: type, depth: int) -> Any:
        # With pickle, an object arrives as what it was without anybody naming its type.
        if self._structs == "plain" or (self._structs == "typed" and not self._allow_pickle):
            typed = self._structs == "typed"
            as_data = self._as_data(obj, kind, depth + typed)
            if as_data is not _NOT_TYPED:
                if not typed:
                    return as_data
                self._descend(depth)
                return _Ext(Code.TYPED, pack((kind.__name__, as_data)))
        if isinstance(obj, np.generic) and kind is obj.dtype.type:
            raw = obj.tobytes()[: obj.dtype.itemsize]  # an empty str has no bytes, but NumPy gives four
            return _Ext(Code.SCALAR, pack((dtypes.describe_dtype(obj.dtype), raw)))
        torch = dtypes.loaded_torch()
        if torch is not None and kind is torch.Tensor:
            memory, name = dtypes.tensor_bytes(obj)
            self._buffer(memory)
            return _Ext(Code.TENSOR, pack((len(memory), tuple(obj.shape), name, obj.requires_grad)))
        raise _Unsupported(_why_not(obj, torch, self._structs))

    def _as_data(self, obj: Any, kind: type, depth: int) -> Any:
        """An object whose type the receiver knows, as plain data; `_NOT_TYPED` if it is none of that kind."""
        if isinstance(obj, enum.Enum):
            return self.value(obj.value, depth)
        record = _record_of(kind)
        if record is not None:
            return self._record(obj, record, depth)
        if isinstance(obj, tuple) and hasattr(kind, "_fields"):
            return self.value(tuple(obj), depth)
        return _NOT_TYPED

    def _pickle(self, obj: Any) -> Any:
        try:
            data = pickle.dumps(obj, protocol=5)
        except Exception as error:  # whatever the object's own methods raise
            why = f"it cannot be pickled: {describe(error)}"
            raise CannotSend(f"an object of type {_name(type(obj))}", why) from error
        return _Ext(Code.PICKLE, data) if len(data) <= INLINE else self._blob(Blob.PICKLE, data)

    def _blob(self, kind: int, data: bytes | bytearray) -> Any:
        self._buffer(memoryview(data))
        return _Ext(Code.BLOB, pack((len(data), kind)))

    def _buffer(self, memory: memoryview) -> None:
        self.arrays += 1
        if len(memory):
            gap = -self.offset % ALIGN
            if gap:
                self.buffers.append(_PADDING[:gap])
            self.buffers.append(memory)
            self.offset += gap + len(memory)


class _Record(NamedTuple):
    """The layout of objects with named fields."""

    fields: tuple[tuple[str, str], ...]
    """The name that is sent and the attribute, of each."""
    tag: tuple[tuple[str, Any], ...] = ()
    """The tag that tells this Struct from others, where msgspec looks for it."""
    is_array: bool = False


@functools.lru_cache(maxsize=512)
def _record_of(kind: type) -> _Record | None:
    """The layout of the objects of a class; None if it is neither a dataclass nor a Struct."""
    if issubclass(kind, msgspec.Struct):
        config = kind.__struct_config__
        tag = () if config.tag is None else ((config.tag_field or "type", config.tag),)
        names = zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True)
        return _Record(tuple(names), tag, config.array_like)
    if dataclasses.is_dataclass(kind):
        return _Record(tuple((field.name, field.name) for field in dataclasses.fields(kind)))
    return None


def _moment(code: int) -> Callable[[HeadWriter, Any, int], Any]:
    names = ["year", "month", "day"] if code == Code.DATETIME else []
    names += ["hour", "minute", "second", "microsecond"]

    def pack_moment(_writer: HeadWriter, obj: Any, _depth: int) -> Any:
        zone = None
        if obj.tzinfo is not None:
            if type(obj.tzinfo) is not dt.timezone:
                raise _Unsupported(
                    f"its time zone is of type {_name(type(obj.tzinfo))}, and only datetime.timezone is plain data "
                    "(such as x.astimezone(datetime.timezone.utc))"
                )
            timezone: Any = obj.tzinfo
            offset, *label = timezone.__getinitargs__()
            zone = (offset // _MICROSECOND, *label)
        return _Ext(code, pack(([getattr(obj, name) for name in names], zone, obj.fold)))

    return pack_moment


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _why_not(obj: Any, torch: Any, structs: Structs) -> str:
    """The reason why an object cannot be sent. For a subclass it has a remedy."""
    bases: list[tuple[type, str]] = [(np.ndarray, "np.asarray(x)"), (dict, "dict(x)"), (tuple, "tuple(x)")]
    bases += [(list, "list(x)"), (str, "str.__str__(x)"), (int, "int(x)"), (float, "float(x)")]
    if torch is not None:
        bases.append((torch.Tensor, "x.detach()"))
    for base, remedy in bases:
        if isinstance(obj, base):
            return f"subclasses of {base.__name__} are not sent as such (send {remedy})"
    if type(obj).__module__.partition(".")[0] in ("jax", "jaxlib"):
        return "an array of JAX is not sent inside an object (send np.asarray(x), and make a JAX array of it there)"
    return f"expected {PLAIN}{' or a dataclass' if structs else ''}"


def _short(key: Any) -> str:
    text = repr(key)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


_PACKERS: dict[type, Callable[[HeadWriter, Any, int], Any]] = {
    list: HeadWriter.items,
    dict: HeadWriter.mapping,
    tuple: lambda w, x, depth: _Ext(Code.TUPLE, pack(w.items(x, depth))),
    set: lambda w, x, depth: _Ext(Code.SET, pack(w.members(x, depth))),
    frozenset: lambda w, x, depth: _Ext(Code.FROZENSET, pack(w.members(x, depth))),
    OrderedDict: lambda w, x, depth: _Ext(Code.ORDERED_DICT, pack(w.pairs(x, depth))),
    int: HeadWriter.integer,
    str: HeadWriter.text,
    bytes: HeadWriter.raw,
    bytearray: HeadWriter.raw_mutable,
    complex: lambda w, x, depth: _Ext(Code.COMPLEX, COMPLEX.pack(x.real, x.imag)),
    dt.date: lambda w, x, depth: _Ext(Code.DATE, pack((x.year, x.month, x.day))),
    dt.time: _moment(Code.TIME),
    dt.datetime: _moment(Code.DATETIME),
    dt.timedelta: lambda w, x, depth: _Ext(Code.TIMEDELTA, pack((x.days, x.seconds, x.microseconds))),
    decimal.Decimal: lambda w, x, depth: _Ext(Code.DECIMAL, str(x).encode()),
    uuid.UUID: lambda w, x, depth: _Ext(Code.UUID, x.bytes),
    np.ndarray: HeadWriter.array,
}
