"""Remote calls and their results as bytes, and back without trust. No I/O.

A call is the list `[name, target, seconds, arguments, keywords]` in the object codec; `target` is the number of a
remote object, or 0 for a plain function. A result and an item of a stream are one value. Both have a fast path and
a general one:

```python
out = encode_call("add", 0, 5.0, (2, 3), {}, limits)     # send out.head, then each of out.buffers
call = fast_call(head) if not payload else NOT_FAST    # one pass in C: numbers, text, short bytes, lists, dicts
if call is NOT_FAST:
    plan = plan_call(head, payload, limits)              # everything is checked here
    target = plan.allocate()                             # receive the payload straight into this
    call = plan.build(target)
```

Both paths write the same bytes, and read the same objects.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, NoReturn, Protocol, TypeAlias

import msgspec

from ..arguments import shown
from ..errors import InvalidMessage, ProtocolError, UsageError
from ..wire import codec
from ..wire.codec import Limits
from ..wire.near_arrays import near_array, pack_call, pack_value
from ..wire.packing import allocate, pack
from ..wire.unpacking import HeadReader, check_depth
from .array_words import ArrayPart, find_arrays, put_arrays, read_words

__all__ = [
    "MAX_NAME",
    "NOT_FAST",
    "CallFields",
    "FrameBody",
    "Limits",
    "Planned",
    "PlannedCall",
    "PlannedValue",
    "decode_error",
    "encode_call",
    "encode_error",
    "encode_value",
    "fast_call",
    "fast_value",
    "plan_call",
    "plan_value",
    "read_value",
]

MAX_NAME = 1024
"""Characters of a function's name."""

SHORT_HEAD = 4096
"""Bytes of a head that is read in the hope that its arrays go the short way: if they do not, it is read again."""

CallFields: TypeAlias = tuple[str, int, float, list[Any], dict[str, Any]]
"""Name, target, seconds left, arguments, keywords."""

_FIELDS = ("name", "target", "seconds", "arguments", "keywords")
_LONGEST = sys.float_info.max  # the largest number of seconds that is one: not infinity
_MAX_DEPTH = Limits().max_depth
_NESTED = frozenset({list, dict, tuple})
_MAX_KIND, _MAX_TYPE, _MAX_MESSAGE, _MAX_TRACEBACK = 64, 1024, 8 << 10, 64 << 10  # characters
_MAX_ERROR = 4 * (_MAX_KIND + _MAX_TYPE + _MAX_MESSAGE + _MAX_TRACEBACK) + 32  # bytes: UTF-8 has at most 4 each
_SHOWN = 40


class _NotFast:
    def __repr__(self) -> str:
        return "NOT_FAST"


NOT_FAST: Any = _NotFast()
"""Returned by the fast path for what only the general path can read. Never a value that was sent."""


class FrameBody(NamedTuple):
    """The head and the payload of a frame, ready to be sent: the head, then the buffers in order."""

    head: bytes
    buffers: Sequence[memoryview]
    """The memory of the arrays and the padding between them. No copy: leave the arrays alone until it is sent."""
    payload: int
    """Bytes of all buffers."""


_new = tuple.__new__  # a named tuple without the Python function that its constructor is
_NO_BUFFERS: tuple[memoryview, ...] = ()


# -- writing ---------------------------------------------------------------------------------------------------------


def encode_call(
    name: str, target: int, seconds: float, args: tuple[Any, ...], kwargs: dict[str, Any], limits: Limits
) -> FrameBody:
    """Turns a call into bytes.

    Args:
        target: The number of a remote object; 0 for a plain function.
        seconds: How long the caller will wait from now.
        args, kwargs: Anything that `codec.encode` takes, and dataclasses, Structs, members of an enum, named tuples.

    Raises:
        UsageError: An argument cannot be sent (the message says which, and where in it), the name is empty or too long,
            the seconds are not finite, or the call exceeds the limits. `UnsupportedArray` for arrays of objects.
    """
    head = pack_call(name, target, seconds, args, kwargs, limits.max_depth)
    if head is not None and len(head) <= limits.max_head:
        return _new(FrameBody, (head, _NO_BUFFERS, 0))
    if not isinstance(name, str) or not name or len(name) > MAX_NAME or not 0 <= seconds <= _LONGEST:
        _refuse_call(name, seconds)
    body = _encode_arrays(name, target, seconds, args, kwargs, limits)
    return body if body is not None else _encode_any_call(name, target, seconds, args, kwargs, limits)


def _encode_arrays(
    name: str, target: int, seconds: float, args: tuple[Any, ...], kwargs: dict[str, Any], limits: Limits
) -> FrameBody | None:
    """A call whose arguments are arrays and plain values; None if they are not, or something is wrong."""
    buffers: list[memoryview] = []
    words = put_arrays((*args, *kwargs.values()) if kwargs else args, buffers)
    if words is None or not all(type(key) is str for key in kwargs):
        return None
    named = dict(zip(kwargs, words[len(args) :], strict=True))
    return _pack_arrays((name, target, seconds, words[: len(args)], named), buffers, limits)


def _pack_arrays(words: Any, buffers: list[memoryview], limits: Limits) -> FrameBody | None:
    try:
        head = pack(words)
    except (OverflowError, UnicodeEncodeError, TypeError):
        return None
    payload = sum(map(len, buffers))
    if len(head) > limits.max_head or payload > limits.max_payload or len(buffers) > limits.max_arrays:
        return None
    return _new(FrameBody, (head, buffers, payload))


def _refuse_call(name: str, seconds: float) -> NoReturn:
    if not 0 <= seconds <= _LONGEST:
        raise UsageError(f"{seconds!r} seconds is not a time to wait (expected a finite number of at least 0)")
    if not isinstance(name, str):
        raise UsageError(f"name={shown(name)} is not valid (expected the name of a registered function)")
    raise UsageError(f"a function's name must have 1 to {MAX_NAME} characters, got {len(name)}")


def _encode_any_call(
    name: str, target: int, seconds: float, args: tuple[Any, ...], kwargs: dict[str, Any], limits: Limits
) -> FrameBody:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise UsageError(f"the function's name {name[:_SHOWN]!r} is not valid text: it has a lone surrogate") from None
    try:
        return _encode_any([name, target, seconds, list(args), dict(kwargs)], limits)
    except UsageError:
        # The name of the argument says more than a path through the whole call.
        for label, value in [*enumerate(args, 1), *((repr(key), kwargs[key]) for key in kwargs)]:
            try:
                _encode_any(value, limits)
            except UsageError as error:
                raise type(error)(f"argument {label} of {name}(): {error}") from error.__cause__
        raise


def _encode_any(value: Any, limits: Limits) -> FrameBody:
    encoded = codec.encode(value, limits=limits, structs="plain")
    return FrameBody(encoded.head, encoded.buffers, encoded.payload_bytes)


def encode_value(value: Any, limits: Limits) -> FrameBody:
    """Turns one value, such as a result or an item of a stream, into bytes.

    Raises:
        UsageError: It cannot be sent (the message says where in it), or is larger than the limits. `UnsupportedArray`
            for arrays of objects.
    """
    head = pack_value(value, limits.max_depth)
    if head is not None and len(head) <= limits.max_head:
        return _new(FrameBody, (head, _NO_BUFFERS, 0))
    buffers: list[memoryview] = []
    words = put_arrays((value,), buffers)
    body = None if words is None else _pack_arrays(words[0], buffers, limits)
    if body is not None:
        return body
    return _encode_any(value, limits)


# -- reading, the fast path ------------------------------------------------------------------------------------------


_decode_value = msgspec.msgpack.Decoder(ext_hook=near_array).decode
_CALL = tuple[
    Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)],
    Annotated[int, msgspec.Meta(ge=0)],
    Annotated[float, msgspec.Meta(ge=0, le=_LONGEST)],
    list[Any],
    dict[str, Any],
]
_decode_call = msgspec.msgpack.Decoder(_CALL, ext_hook=near_array).decode
_read_call_words = msgspec.msgpack.Decoder(_CALL).decode


def fast_value(head: bytes | bytearray | memoryview) -> Any:
    """The value of a head that has no payload, if one pass in C can read it; otherwise `NOT_FAST`. Never raises.

    Values nested deeper than the codec's default are left to the general path. The caller bounds the head's length.
    """
    try:
        value = _decode_value(head)
        if type(value) in _NESTED and len(head) > _MAX_DEPTH:  # each level takes a byte: a short head cannot be deep
            check_depth(bytes(head), value, _MAX_DEPTH)
    except Exception:  # the general path will say what is wrong
        return NOT_FAST
    return value


def read_value(head: bytes | bytearray | memoryview, limits: Limits) -> Any:
    """The value of a head that has no payload.

    Raises:
        InvalidMessage: The head is malformed, or exceeds the limits.
    """
    value = fast_value(head)
    return value if value is not NOT_FAST else plan_value(head, 0, limits).build()


def fast_call(head: bytes | bytearray | memoryview) -> Any:
    """The `CallFields` of a head that has no payload, if one pass in C can read it; otherwise `NOT_FAST`. Never raises.

    Values nested deeper than the codec's default are left to the general path. The caller bounds the head's length.
    """
    try:
        call = _decode_call(head)
        if len(head) > _MAX_DEPTH and not (
            _NESTED.isdisjoint(map(type, call[3])) and _NESTED.isdisjoint(map(type, call[4].values()))
        ):
            check_depth(bytes(head), call, _MAX_DEPTH)
    except Exception:  # the general path will say what is wrong
        return NOT_FAST
    return call


def read_call(head: bytes | bytearray | memoryview, limits: Limits) -> CallFields:
    """The call in a head that has no payload.

    Raises:
        InvalidMessage: The head is malformed, or exceeds the limits.
    """
    call = fast_call(head)
    return call if call is not NOT_FAST else plan_call(head, 0, limits).build()  # type: ignore[no-any-return]


# -- reading arrays ---------------------------------------------------------------------------------------------------


class Planned(Protocol):
    """A checked head, and the layout of its arrays."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of the arrays."""

    def allocate(self) -> memoryview:
        """Memory for the payload: `payload_bytes` writable bytes that begin at a multiple of 64."""

    def build(self, target: memoryview | bytearray | None = None) -> Any:
        """The value or the call. Its arrays are views of the target, which must not be used for anything else."""


class _PlannedArrays:
    """A message whose arrays are read by the short way."""

    __slots__ = ("_found", "_key", "_parts", "payload_bytes")

    def __init__(self, found: Any, key: Any, parts: list[ArrayPart], payload_bytes: int) -> None:
        self._found = found
        self._key = key
        self._parts = parts
        self.payload_bytes = payload_bytes

    def allocate(self) -> memoryview:
        return allocate(self.payload_bytes)

    def build(self, target: memoryview | bytearray | None = None) -> Any:
        assert target is not None
        for part in self._parts:
            part.place(target)  # type: ignore[arg-type]
        return self._found if self._key is None else self._found[self._key]


def _plan_array(head: bytes | bytearray | memoryview, payload_bytes: int, limits: Limits) -> _PlannedArrays | None:
    """The plan of a value that is an array; None if it is not one of the common kinds, or something is wrong."""
    try:
        holder = [read_words(head)]
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    parts: list[ArrayPart] = []
    end = find_arrays(holder, enumerate(holder), parts, 0)
    if end != payload_bytes or not _may_be(head, payload_bytes, parts, limits):
        return None
    return _PlannedArrays(holder, 0, parts, payload_bytes)


def _plan_arrays(head: bytes | bytearray | memoryview, payload_bytes: int, limits: Limits) -> _PlannedArrays | None:
    """The plan of a call whose arguments are arrays and plain values; None as for `_plan_array`."""
    try:
        call = _read_call_words(head)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    parts: list[ArrayPart] = []
    end = find_arrays(call[3], enumerate(call[3]), parts, 0)
    if end >= 0 and call[4]:
        end = find_arrays(call[4], call[4].items(), parts, end)
    if end != payload_bytes or not _may_be(head, payload_bytes, parts, limits):
        return None
    return _PlannedArrays(call, None, parts, payload_bytes)


def _may_be(head: bytes | bytearray | memoryview, payload_bytes: int, parts: list[ArrayPart], limits: Limits) -> bool:
    return len(head) <= limits.max_head and payload_bytes <= limits.max_payload and len(parts) <= limits.max_arrays


# -- reading, the general path ---------------------------------------------------------------------------------------


class PlannedValue:
    """A checked head, and the layout of its arrays. Made by `plan_value`; used like a `codec.Plan`."""

    __slots__ = ("_plan", "payload_bytes")

    def __init__(self, plan: codec.DecodePlan) -> None:
        self._plan = plan
        self.payload_bytes = plan.payload_bytes

    def allocate(self) -> memoryview:
        """Memory for the payload: `payload_bytes` writable bytes that begin at a multiple of 64."""
        return self._plan.allocate()

    def build(self, target: memoryview | bytearray | None = None) -> Any:
        """The value. Its arrays are views of the target, which must not be used for anything else. To be called once.

        Raises:
            InvalidMessage: The payload does not fit the arrays.
            UsageError: The target does not have `payload_bytes` bytes.
            BackendUnavailable: A tensor has a dtype that needs torch, which is not installed here.
        """
        try:
            return self._plan.build(target)
        except ProtocolError as error:
            raise InvalidMessage(f"the arrays in a remote call are not valid: {error}") from None


class PlannedCall(PlannedValue):
    """The checked head of a call. Made by `plan_call`."""

    __slots__ = ()

    def build(self, target: memoryview | bytearray | None = None) -> CallFields:
        """The call. Its arrays are views of the target, which must not be used for anything else. To be called once.

        Raises:
            InvalidMessage, UsageError, BackendUnavailable: As `PlannedValue.build`.
        """
        name, number, seconds, args, kwargs = super().build(target)
        return name, number, float(seconds), args, kwargs


def plan_value(head: bytes | bytearray | memoryview, payload_bytes: int, limits: Limits) -> Planned:
    """Checks the head of one value; nothing is allocated for its arrays yet.

    Raises:
        InvalidMessage: The head is malformed, does not fit the payload, or exceeds the limits.
    """
    planned = _plan_array(head, payload_bytes, limits) if payload_bytes > 0 and len(head) <= SHORT_HEAD else None
    if planned is not None:
        return planned
    try:
        return PlannedValue(codec.decode_head(head, payload_bytes=payload_bytes, limits=limits))
    except (ProtocolError, UsageError) as error:
        raise InvalidMessage(f"the value of a remote call cannot be read: {_why(error)}") from None


def plan_call(head: bytes | bytearray | memoryview, payload_bytes: int, limits: Limits) -> Planned:
    """Checks the head of a call; nothing is allocated for its arrays yet.

    Raises:
        InvalidMessage: The head is malformed, is not a call, does not fit the payload, or exceeds the limits. The
            message names the field: name, target, seconds, arguments or keywords.
    """
    planned = _plan_arrays(head, payload_bytes, limits) if payload_bytes > 0 and len(head) <= SHORT_HEAD else None
    if planned is not None:
        return planned
    try:
        plan = codec.decode_head(head, payload_bytes=payload_bytes, limits=limits)
    except (ProtocolError, UsageError) as error:
        field = _unreadable_field(head, limits) if len(head) <= limits.max_head else None
        where = "" if field is None else f" its {field} cannot be read:"
        raise InvalidMessage(f"a remote call is not valid:{where} {_why(error)}") from None
    wrong = _wrong_field(plan.outline)
    if wrong:
        raise InvalidMessage(f"a remote call is not valid: {wrong}")
    return PlannedCall(plan)


def _why(error: Exception) -> str:
    # The codec's own words would offer allow_pickle, which remote calls do not have.
    return (
        str(error) if isinstance(error, ProtocolError) else "it contains pickled data, which remote calls never accept"
    )


def _wrong_field(call: Any) -> str:
    """A description of the first invalid field of a call; empty if all are valid."""
    if type(call) is not list or len(call) != len(_FIELDS):
        what = f"a list of {len(call)}" if type(call) is list else type(call).__name__
        return f"expected a list of {', '.join(_FIELDS)}, got {what}"
    name, target, seconds, args, kwargs = call
    if type(name) is not str or not 1 <= len(name) <= MAX_NAME or not _is_text(name):
        return f"its name must be text of 1 to {MAX_NAME} characters, got {_shown(name)}"
    if type(target) is not int or not 0 <= target < 2**64:
        return f"its target must be the number of an object or 0, got {_shown(target)}"
    if type(seconds) not in (int, float) or not 0 <= seconds <= _LONGEST:
        return f"its seconds must be a finite number, 0 or more, got {_shown(seconds)}"
    if type(args) is not list:
        return f"its arguments must be a list, got {_shown(args)}"
    if type(kwargs) is not dict:
        return f"its keywords must be a dict, got {_shown(kwargs)}"
    odd = next((key for key in kwargs if type(key) is not str), None)
    if odd is not None or None in kwargs:
        return f"its keywords must have names, got {_shown(odd)}"
    return ""


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: Any) -> str:
    """A value as an error message shows it: always short, and without running code of its type."""
    kind = type(value)
    if kind is str or kind is bytes:
        text = repr(value[:_SHOWN])
        return text if len(value) <= _SHOWN else f"{text}... ({len(value)} long)"
    if value is None or kind in (bool, float) or (kind is int and value.bit_length() <= 128):
        return repr(value)
    return f"a value of type {kind.__name__.lstrip('_')}"


class _Field:
    """A type that msgspec does not know, so that it calls a hook for each one that it reads."""


_OPENING = b"\x95"  # the first byte of a list of five
_five_fields = tuple[_Field, _Field, _Field, _Field, _Field]
_raw_fields = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode


def _unreadable_field(head: bytes | bytearray | memoryview, limits: Limits) -> str | None:
    """The field of an unreadable call that is to blame; None if it is not a single one."""
    done: list[Any] = []

    def note(_kind: type, value: Any) -> Any:
        done.append(value)
        return _Field()

    try:
        msgspec.msgpack.decode(head, type=_five_fields, dec_hook=note, ext_hook=lambda _code, _data: None)
    except msgspec.ValidationError:
        return None  # not a list of five
    except Exception:  # cut short or nested too deep, which C reports in several ways
        begun = done or head[:1] == _OPENING  # otherwise it is not even a list
        return _FIELDS[len(done)] if begun and len(done) < len(_FIELDS) else None
    # Well-formed MessagePack: an extension must be wrong, or the limit of all fields together is exceeded.
    for name, raw in zip(_FIELDS, _raw_fields(head), strict=True):
        reader = HeadReader(limits)
        try:
            check_depth(bytes(raw), reader.read(bytes(raw)), limits.max_depth)
        except ProtocolError:
            return name
        if reader.pickled:
            return name
    return None


# -- errors ----------------------------------------------------------------------------------------------------------

_decode_error = msgspec.msgpack.Decoder(tuple[str, str, str, str]).decode


def encode_error(kind: str, type_name: str, message: str, traceback: str) -> bytes:
    """Encodes an error. Long texts are cut, and characters outside UTF-8 are escaped. Never raises.

    Args:
        kind: Says which exception the caller is to raise.
        type_name: The type of the exception that the function raised.
    """
    parts = _cut_error(kind, type_name, message, traceback)
    try:
        return pack(parts)
    except (UnicodeEncodeError, TypeError):  # a lone surrogate, or a subclass of str
        escaped = (str.encode(part, "utf-8", "backslashreplace").decode() for part in parts)
        return pack(_cut_error(*escaped))


def decode_error(head: bytes | bytearray | memoryview) -> tuple[str, str, str, str]:
    """Kind, type name, message and traceback of an error; long texts are cut.

    Raises:
        InvalidMessage: The bytes are not an error, or too many.
    """
    if len(head) > _MAX_ERROR:
        raise InvalidMessage(f"the error of a remote call takes {len(head)} bytes (at most {_MAX_ERROR} are allowed)")
    try:
        return _cut_error(*_decode_error(head))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidMessage(f"the error of a remote call cannot be read: {error}") from None


def _cut_error(kind: str, type_name: str, message: str, traceback: str) -> tuple[str, str, str, str]:
    if len(traceback) > _MAX_TRACEBACK:
        # The end says what was raised and the beginning where it came from; what repeats is in the middle.
        mark = "\n... (cut) ...\n"
        kept = _MAX_TRACEBACK - len(mark)
        traceback = traceback[: kept // 4] + mark + traceback[kept // 4 - kept :]
    return _cut(kind, _MAX_KIND), _cut(type_name, _MAX_TYPE), _cut(message, _MAX_MESSAGE), traceback


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
