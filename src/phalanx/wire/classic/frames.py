"""The byte formats of the classic wire, which a rank written in Rust speaks too. No I/O.

```
star hello       rank u64
message          length u64, then the bytes
mesh hello       rank u64, advertisement                  advertisement: four octets of IPv4, port u16
table            one advertisement per rank
peer hello       rank u64
request          01, id u64, length u32, name, length u32, payload
response         02, id u64, flag (00 result, 01 error), length u32, bytes       after a message with its length as u64
```

All integers are little endian, and there is no authentication. Phalanx adds one thing, and uses it only between its
own ranks: if bit 63 of a message's length is set, the rest of the length counts the bytes of an *escaped frame*: the
context of a group (16 bytes) and a frame as in `phalanx.wire.frames`.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.errors import ConfigError, InvalidMessage, ProtocolError
from phalanx.types import Address

__all__ = [
    "ADVERTISEMENT_SIZE",
    "BARRIER",
    "ESCAPE_BIT",
    "HELLO_SIZE",
    "LENGTH_SIZE",
    "MAX_REMOTE_CALL",
    "MESH_HELLO_SIZE",
    "MeshHello",
    "Request",
    "Response",
    "not_registered",
    "pack_advertisement",
    "pack_escaped_length",
    "pack_hello",
    "pack_length",
    "pack_mesh_hello",
    "pack_request",
    "pack_response",
    "pack_response_length",
    "pack_table",
    "parse_advertisement",
    "parse_length",
    "parse_mesh_hello",
    "parse_peer_hello",
    "parse_request",
    "parse_response",
    "parse_response_length",
    "parse_star_hello",
    "parse_table",
]

Buffer = bytes | bytearray | memoryview

_U64 = struct.Struct("<Q")
_U32 = struct.Struct("<I")
_PORT = struct.Struct("<H")

LENGTH_SIZE = 8
HELLO_SIZE = 8
ADVERTISEMENT_SIZE = 6
MESH_HELLO_SIZE = HELLO_SIZE + ADVERTISEMENT_SIZE
BARRIER = b"\x00"
"""The message that says "I am here" and "go on"."""
ESCAPE_BIT = 1 << 63
MAX_REMOTE_CALL = 1 << 30
"""Bytes in one request or response, for either side."""


# -- messages --------------------------------------------------------------------------------------------------------


def pack_length(length: int) -> bytes:
    """The header of a message of so many bytes.

    Raises:
        ProtocolError: No such length can be written.
    """
    return _U64.pack(_checked_length(length))


def pack_escaped_length(length: int) -> bytes:
    """The header of an escaped frame of so many bytes, its context included.

    Raises:
        ProtocolError: No such length can be written.
    """
    return _U64.pack(_checked_length(length) | ESCAPE_BIT)


def parse_length(data: Buffer, max_message: int) -> tuple[int, bool]:
    """How many bytes follow a message's header, and whether they are an escaped frame.

    Raises:
        ProtocolError: They are more than `max_message`, or the header is not 8 bytes.
    """
    value = _u64(data, "the length of a message")
    length, escaped = value & ~ESCAPE_BIT, value >= ESCAPE_BIT
    if length > max_message:
        raise ProtocolError(f"a message announces {length} bytes (at most {max_message} are allowed)")
    return length, escaped


def _checked_length(length: int) -> int:
    if not 0 <= length < ESCAPE_BIT:
        raise ProtocolError(f"a message of {length} bytes cannot be sent (expected 0 to {ESCAPE_BIT - 1})")
    return length


def _u64(data: Buffer, what: str) -> int:
    if len(data) != _U64.size:
        raise ProtocolError(f"{what} has {len(data)} bytes (expected {_U64.size})")
    value: int = _U64.unpack(data)[0]
    return value


# -- rendezvous ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MeshHello:
    """What a rank tells rank 0 of the mesh: who it is, and where its peers can reach it."""

    rank: int
    address: Address


def pack_hello(rank: int) -> bytes:
    """What a rank says first, to rank 0 of the star and to a peer of the mesh."""
    return _U64.pack(rank)


def parse_star_hello(data: Buffer, world_size: int) -> int:
    """The rank that connected to rank 0.

    Raises:
        ProtocolError: It is 0 or not below the world size.
    """
    return _rank(data, 1, world_size)


def parse_peer_hello(data: Buffer, own_rank: int, world_size: int) -> int:
    """The rank that connected to the peer listener of `own_rank`.

    Raises:
        ProtocolError: It is not above the own rank and below the world size.
    """
    return _rank(data, own_rank + 1, world_size)


def _rank(data: Buffer, lowest: int, world_size: int) -> int:
    rank = _u64(data, "a hello")
    if not lowest <= rank < world_size:
        valid = f"expected {lowest} to {world_size - 1}" if lowest < world_size else "none is expected"
        raise ProtocolError(f"a connection claims rank {rank}, which is not valid here ({valid})")
    return rank


def pack_advertisement(address: Address) -> bytes:
    """Where a rank can be reached, in 6 bytes.

    Raises:
        ConfigError: The host is no IPv4 address, or the port cannot be connected to.
    """
    try:
        octets = ipaddress.IPv4Address(address.host).packed
    except ValueError:
        raise ConfigError(
            f"{address} cannot be advertised on the classic wire, which has room for an IPv4 address only "
            "(bind an IPv4 address, or use wire='phalanx', which knows IPv6 and names)"
        ) from None
    if not 0 < address.port < 1 << 16:
        raise ConfigError(f"{address} cannot be advertised on the classic wire (expected a port from 1 to 65535)")
    return octets + _PORT.pack(address.port)


def parse_advertisement(data: Buffer) -> Address:
    """Where another rank says that it can be reached.

    Raises:
        ProtocolError: There are not 6 bytes, or the port is 0.
    """
    if len(data) != ADVERTISEMENT_SIZE:
        raise ProtocolError(f"an advertisement has {len(data)} bytes (expected {ADVERTISEMENT_SIZE})")
    host = str(ipaddress.IPv4Address(bytes(data[:4])))
    (port,) = _PORT.unpack(data[4:])
    if port == 0:
        raise ProtocolError(f"an advertisement of {host} has port 0 (expected 1 to 65535)")
    return Address(host, port)


def pack_mesh_hello(rank: int, address: Address) -> bytes:
    """What a rank tells rank 0 of the mesh.

    Raises:
        ConfigError: See `pack_advertisement`.
    """
    return pack_hello(rank) + pack_advertisement(address)


def parse_mesh_hello(data: Buffer, world_size: int) -> MeshHello:
    """Who connected to rank 0 of the mesh, and where it can be reached.

    Raises:
        ProtocolError: The rank is 0 or not below the world size, or the advertisement is not valid.
    """
    if len(data) != MESH_HELLO_SIZE:
        raise ProtocolError(f"a hello of the mesh has {len(data)} bytes (expected {MESH_HELLO_SIZE})")
    return MeshHello(_rank(data[:HELLO_SIZE], 1, world_size), parse_advertisement(data[HELLO_SIZE:]))


def pack_table(addresses: Sequence[Address]) -> bytes:
    """Where every rank can be reached, in rank order.

    Raises:
        ConfigError: See `pack_advertisement`.
    """
    return b"".join(map(pack_advertisement, addresses))


def parse_table(data: Buffer, world_size: int) -> list[Address]:
    """Where every rank can be reached.

    Raises:
        ProtocolError: The table is not one of `world_size` advertisements.
    """
    if len(data) != world_size * ADVERTISEMENT_SIZE:
        raise ProtocolError(
            f"a table has {len(data)} bytes (expected {world_size * ADVERTISEMENT_SIZE} for {world_size} ranks)"
        )
    return [parse_advertisement(data[at : at + ADVERTISEMENT_SIZE]) for at in range(0, len(data), ADVERTISEMENT_SIZE)]


# -- remote calls ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Request:
    """A remote call. A parsed payload is a view of the message."""

    id: int
    name: str
    payload: Buffer


@dataclass(frozen=True, slots=True)
class Response:
    """The answer to a remote call: the result's bytes (a view of the message), or the text of an error."""

    id: int
    result: Buffer = b""
    error: str | None = None


def not_registered(name: str, rank: int) -> str:
    """The text of the error that answers a call of an unknown name."""
    return f"function '{name}' not registered on rank {rank}"  # not repr: the other side may compare the text


def pack_request(request: Request) -> bytes:
    """The bytes of a request: one message.

    Raises:
        InvalidMessage: It is larger than 1 GiB, its id is no u64, or its name is no valid text.
    """
    name = _utf8(request.name, "request", "name")
    payload = memoryview(request.payload)
    _check_call(1 + 8 + 4 + len(name) + 4 + payload.nbytes, "request")
    parts = (b"\x01", _pack_id(request.id), _U32.pack(len(name)), name, _U32.pack(payload.nbytes), payload)
    return b"".join(parts)


def parse_request(data: Buffer) -> Request:
    """Reads a request.

    Raises:
        InvalidMessage: It is too large, cut short (the message says in which field) or malformed.
    """
    fields = _Fields(data, "request", 0x01)
    request_id = fields.number(_U64, "request id")
    name = fields.text(fields.number(_U32, "name length"), "name")
    payload = fields.take(fields.number(_U32, "payload length"), "payload")
    fields.end()
    return Request(request_id, name, payload)


def pack_response(response: Response) -> bytes:
    """The bytes of a response; a message with its length goes before it, see `pack_response_length`.

    Raises:
        InvalidMessage: It is larger than 1 GiB, its id is no u64, or its error is no valid text.
    """
    failed = response.error is not None
    body = memoryview(response.result if response.error is None else _utf8(response.error, "response", "error text"))
    _check_call(1 + 8 + 1 + 4 + body.nbytes, "response")
    return b"".join((b"\x02", _pack_id(response.id), bytes([failed]), _U32.pack(body.nbytes), body))


def parse_response(data: Buffer) -> Response:
    """Reads a response.

    Raises:
        InvalidMessage: It is too large, cut short (the message says in which field) or malformed.
    """
    fields = _Fields(data, "response", 0x02)
    response_id = fields.number(_U64, "request id")
    flag = fields.take(1, "flag")[0]
    if flag > 1:
        raise InvalidMessage(f"the flag of a response is {flag:02x} (expected 00 for a result or 01 for an error)")
    length = fields.number(_U32, "length")
    if flag:
        response = Response(response_id, error=fields.text(length, "error text"))
    else:
        response = Response(response_id, fields.take(length, "result"))
    fields.end()
    return response


def pack_response_length(length: int) -> bytes:
    """The 8-byte message that goes before a response.

    Raises:
        InvalidMessage: The response is larger than 1 GiB.
    """
    _check_call(length, "response")
    return _U64.pack(length)


def parse_response_length(data: Buffer) -> int:
    """How long the response will be that comes next.

    Raises:
        InvalidMessage: It is larger than 1 GiB, or there are not 8 bytes.
    """
    if len(data) != _U64.size:
        raise InvalidMessage(f"the length of a response has {len(data)} bytes (expected {_U64.size})")
    length: int = _U64.unpack(data)[0]
    _check_call(length, "response")
    return length


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
        try:
            return str(self.take(size, field), "utf-8")
        except UnicodeDecodeError as error:
            raise InvalidMessage(f"the {field} of a {self._what} is not UTF-8: {error}") from None

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


def _utf8(text: str, what: str, field: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidMessage(f"the {field} of a {what} cannot be written as UTF-8: {error}") from None
