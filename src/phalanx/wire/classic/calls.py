"""The messages of remote calls on the classic wire, as an agent handles them. No I/O.

```
request          01, id u64, length u32, name, length u32, payload                             one message
length           length of the response u64                                                    one message
response         02, id u64, flag (00 result, 01 error), length u32, bytes                     one message
```

The fields are read by `phalanx.wire.classic.frames`, which knows the whole classic wire. Here a response has one shape
for results and errors, and what an agent asks of a message before it can be read is answered: which kind it is, and
whose answer. A request has at least 17 bytes and a response at least 14, so a message of 8 bytes is always a length.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from ...errors import InvalidMessage
from . import frames
from .frames import (
    MAX_REMOTE_CALL,
    Buffer,
    Request,
    not_registered,
    pack_request,
    pack_response_length,
    parse_request,
    parse_response_length,
)

__all__ = [
    "MAX_REMOTE_CALL",
    "MIN_RESPONSE",
    "Kind",
    "Request",
    "Response",
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

MIN_RESPONSE = 1 + 8 + 1 + 4
_LENGTH_SIZE = 8


class Kind(enum.Enum):
    """What a message seems to be; only reading it tells whether it is."""

    REQUEST = enum.auto()
    LENGTH = enum.auto()
    RESPONSE = enum.auto()


class Response(NamedTuple):
    """The answer to a remote call: the bytes of the result, or the text of an error in UTF-8."""

    id: int
    error: bool
    data: bytes


def kind_of(data: Buffer) -> Kind:
    """What a message is by its length and its first byte. What is nothing of all this passes for a request."""
    if len(data) == _LENGTH_SIZE:
        return Kind.LENGTH
    return Kind.RESPONSE if len(data) and data[0] == 0x02 else Kind.REQUEST


def response_id(data: Buffer) -> int | None:
    """The call that a response answers, also of one that cannot be read as a whole; None if that cannot be told."""
    if len(data) < 9 or data[0] != 0x02:
        return None
    return int.from_bytes(data[1:9], "little")


def pack_response(response: Response) -> bytes:
    """The bytes of a response; a message with its length goes before it, see `pack_response_length`.

    Raises:
        InvalidMessage: It is larger than 1 GiB, its id is no u64, or its error is not UTF-8.
    """
    pack_response_length(MIN_RESPONSE + len(response.data))  # refuses what is too large, before it is copied
    if not response.error:
        return frames.pack_response(frames.Response(response.id, response.data))
    try:
        text = response.data.decode()
    except UnicodeDecodeError as error:
        raise InvalidMessage(f"the error text of a response is not UTF-8: {error}") from None
    return frames.pack_response(frames.Response(response.id, error=text))


def parse_response(data: Buffer) -> Response:
    """Reads a response.

    Raises:
        InvalidMessage: It is too large, cut short (the message says in which field) or malformed.
    """
    response = frames.parse_response(data)
    if response.error is None:
        return Response(response.id, False, bytes(response.result))
    return Response(response.id, True, response.error.encode())


def says_not_registered(text: str, name: str) -> bool:
    """Whether the text of an error is the one with which a rank answers a call of a name that it does not know."""
    rank = text.rpartition(" ")[2]
    return rank.isascii() and rank.isdecimal() and len(rank) < 20 and text == not_registered(name, int(rank))
