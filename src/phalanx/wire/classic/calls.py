"""The messages of remote calls on the classic wire. No I/O.

```
request          01, id u64, length u32, name, length u32, payload                             one message
length           length of the response u64                                                    one message
response         02, id u64, flag (00 result, 01 error), length u32, bytes                     one message
```

All integers are little endian. A request has at least 17 bytes and a response at least 14, so a message of 8 bytes is
always a length.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import NamedTuple

from ...errors import InvalidMessage
from .frames import Buffer

__all__ = [
    "MAX_REMOTE_CALL",
    "MIN_RESPONSE",
    "CallRequest",
    "CallResponse",
    "MessageKind",
    "kind_of",
    "not_registered",
    "pack_request",
    "pack_response",
    "pack_response_length",
    "parse_request",
    "parse_response",
    "parse_response_length",
    "response_id",
    "says_not_registered",
]

_U64 = struct.Struct("<Q")
_U32 = struct.Struct("<I")

MAX_REMOTE_CALL = 1 << 30
"""Bytes in one request or response, for either side."""
MIN_RESPONSE = 1 + 8 + 1 + 4
_LENGTH_SIZE = _U64.size


class MessageKind(enum.Enum):
    """The kind of a message, judged by its length and first byte only."""

    REQUEST = enum.auto()
    LENGTH = enum.auto()
    RESPONSE = enum.auto()


@dataclass(frozen=True, slots=True)
class CallRequest:
    """A remote call. A parsed payload is a view of the message."""

    id: int
    name: str
    payload: Buffer


class CallResponse(NamedTuple):
    """The answer to a remote call: the bytes of the result, or the text of an error in UTF-8."""

    id: int
    error: bool
    data: bytes


def kind_of(data: Buffer) -> MessageKind:
    """The kind of a message by its length and first byte. Anything else counts as a request, which will be refused."""
    if len(data) == _LENGTH_SIZE:
        return MessageKind.LENGTH
    return MessageKind.RESPONSE if len(data) and data[0] == 0x02 else MessageKind.REQUEST


def response_id(data: Buffer) -> int | None:
    """The call that a response answers, also of one that cannot be read as a whole; None if that cannot be told."""
    if len(data) < 9 or data[0] != 0x02:
        return None
    return int.from_bytes(data[1:9], "little")


def pack_request(request: CallRequest) -> bytes:
    """The bytes of a request: one message.

    Raises:
        InvalidMessage: It is larger than 1 GiB, its id is no u64, or its name is no valid text.
    """
    try:
        name = request.name.encode()
    except UnicodeEncodeError as error:
        raise InvalidMessage(f"the name of a request cannot be written as UTF-8: {error}") from None
    payload = memoryview(request.payload)
    _check_call(1 + 8 + 4 + len(name) + 4 + payload.nbytes, "request")
    parts = (b"\x01", _pack_id(request.id), _U32.pack(len(name)), name, _U32.pack(payload.nbytes), payload)
    return b"".join(parts)


def parse_request(data: Buffer) -> CallRequest:
    """Reads a request.

    Raises:
        InvalidMessage: It is too large, cut short (the message says in which field) or malformed.
    """
    fields = _Fields(data, "request", 0x01)
    request_id = fields.number(_U64, "request id")
    name = fields.text(fields.number(_U32, "name length"), "name")
    payload = fields.take(fields.number(_U32, "payload length"), "payload")
    fields.end()
    return CallRequest(request_id, name, payload)


def pack_response(response: CallResponse) -> bytes:
    """The bytes of a response; a message with its length goes before it, see `pack_response_length`.

    Raises:
        InvalidMessage: It is larger than 1 GiB, its id is no u64, or its error is not UTF-8.
    """
    body = response.data
    _check_call(MIN_RESPONSE + len(body), "response")
    if response.error:
        _text(body, "response", "error text")
    return b"".join((b"\x02", _pack_id(response.id), bytes([response.error]), _U32.pack(len(body)), body))


def parse_response(data: Buffer) -> CallResponse:
    """Reads a response.

    Raises:
        InvalidMessage: It is too large, cut short (the message says in which field) or malformed.
    """
    fields = _Fields(data, "response", 0x02)
    response_id = fields.number(_U64, "request id")
    flag = fields.take(1, "flag")[0]
    if flag > 1:
        raise InvalidMessage(f"the flag of a response is {flag:02x} (expected 00 for a result or 01 for an error)")
    field = "error text" if flag else "result"
    body = bytes(fields.take(fields.number(_U32, "length"), field))
    if flag:
        _text(body, "response", field)
    fields.end()
    return CallResponse(response_id, bool(flag), body)


def pack_response_length(length: int) -> bytes:
    """The 8-byte message that goes before a response.

    Raises:
        InvalidMessage: The response is larger than 1 GiB.
    """
    _check_call(length, "response")
    return _U64.pack(length)


def parse_response_length(data: Buffer) -> int:
    """The length of the response that comes next.

    Raises:
        InvalidMessage: It is larger than 1 GiB, or there are not 8 bytes.
    """
    if len(data) != _U64.size:
        raise InvalidMessage(f"the length of a response has {len(data)} bytes (expected {_U64.size})")
    length: int = _U64.unpack(data)[0]
    _check_call(length, "response")
    return length


def not_registered(name: str, rank: int) -> str:
    """The text of the error that answers a call of an unknown name."""
    return f"function '{name}' not registered on rank {rank}"  # not repr: the other side may compare the text


def says_not_registered(text: str, name: str) -> bool:
    """True if the text of an error is the answer of a rank to a call of a name that it does not know."""
    rank = text.rpartition(" ")[2]
    return rank.isascii() and rank.isdecimal() and len(rank) < 20 and text == not_registered(name, int(rank))


class _Fields:
    """Reads a remote-call message from front to end."""

    def __init__(self, data: Buffer, what: str, kind: int) -> None:
        self._view = memoryview(data).cast("B")
        self._what = what
        self._at = 0
        _check_call(len(self._view), what)
        first = self.take(1, "first byte")[0]
        if first != kind:
            raise InvalidMessage(f"the first byte of a {what} is {first:02x} (expected {kind:02x})")

    def take(self, size: int, field: str) -> memoryview:
        left = len(self._view) - self._at
        if left < size:
            raise InvalidMessage(f"a {self._what} is cut short in its {field}: {size} bytes expected, {left} left")
        self._at += size
        return self._view[self._at - size : self._at]

    def number(self, layout: struct.Struct, field: str) -> int:
        value: int = layout.unpack(self.take(layout.size, field))[0]
        return value

    def text(self, size: int, field: str) -> str:
        return _text(bytes(self.take(size, field)), self._what, field)

    def end(self) -> None:
        if self._at != len(self._view):
            raise InvalidMessage(f"a {self._what} has {len(self._view) - self._at} bytes after its end")


def _check_call(size: int, what: str) -> None:
    if size > MAX_REMOTE_CALL:
        raise InvalidMessage(f"a {what} of {size} bytes is too large (at most {MAX_REMOTE_CALL} are allowed)")


def _pack_id(request_id: int) -> bytes:
    if not 0 <= request_id < 1 << 64:
        raise InvalidMessage(f"request id {request_id} is not valid (expected 0 to {(1 << 64) - 1})")
    return _U64.pack(request_id)


def _text(data: bytes, what: str, field: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidMessage(f"the {field} of a {what} is not UTF-8: {error}") from None
