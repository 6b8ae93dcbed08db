"""The messages between ranks, launchers and the directory: MessagePack behind a length. No I/O."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Generic, Literal, TypeVar

import msgspec

from ..errors import ProtocolError
from ..exception_text import printable

__all__ = [
    "Abort",
    "Arrivals",
    "Break",
    "ControlReader",
    "EncodedError",
    "Ended",
    "Evict",
    "Heartbeat",
    "Join",
    "Leave",
    "Leaving",
    "Left",
    "Lost",
    "Member",
    "Message",
    "MessageReader",
    "Note",
    "OperationStatus",
    "Refused",
    "Regroup",
    "Roster",
    "Shutdown",
    "SlateQuery",
    "SlateRanks",
    "SlateReply",
    "StatusQuery",
    "StatusReply",
    "Statuses",
    "Struct",
    "View",
    "Waiting",
    "Welcome",
    "pack",
    "pack_error",
    "parse_error",
]

_LENGTH = struct.Struct("<I")
MAX_CONTROL = 16 << 20
"""Bytes in one message. The largest is the roster: some 150 bytes a rank."""


class Struct(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages."""


class Member(msgspec.Struct, frozen=True, array_like=True):
    """One rank, as the roster tells it to all."""

    rank: int
    hostname: str
    host_id: str
    """The same for ranks that share a kernel and a network, different otherwise."""
    pid: int
    host: str
    """The address of its listener."""
    port: int
    local_rank: int
    memory: str = ""
    """The same for ranks that can map each other's memory; empty for one that cannot or shall not share any."""
    cores: str = ""
    """The cores that it may run on, a bit each, in hexadecimal; empty if it does not know."""


class EncodedError(msgspec.Struct, frozen=True, array_like=True):
    """An exception as data. `phalanx.rendezvous.error_codec` makes it of an exception, and an exception of it."""

    kind: str
    message: str
    peer: int
    traceback: str = ""
    mine: str = ""
    theirs: str = ""
    missing: list[int] = []
    arrived: list[int] = []
    seconds: float | None = None


class OperationStatus(msgspec.Struct, frozen=True, array_like=True):
    """The last or current operation of a rank in one group."""

    operation: str
    """The verb, or "" if there was none yet."""
    sequence: int
    """The number of the collective that this rank entered last."""
    fingerprint: int
    """The fingerprint of that collective."""
    site: str
    """The user's source line that called it."""
    running: bool
    seconds: float
    """Since it began (running) or ended."""
    at: str = ""
    """Where the program is, if no operation runs."""
    failed: bool = False
    """Whether it ended by an error."""


class Join(Struct, frozen=True):
    """A rank says where it can be reached."""

    member: Member


class Welcome(Struct, frozen=True):
    """A rank that came without a number gets one."""

    rank: int


class Waiting(Struct, frozen=True):
    """The world is not complete yet."""

    missing: list[int]
    gone: list[int] = []
    """Those of the missing that were here and went away again."""


class Roster(Struct, frozen=True):
    """The world is complete."""

    members: list[Member]
    host: int | None = None
    """The rank that the directory ends with, if it has no process of its own."""
    elastic: bool = False
    """True if ranks that are lost may be replaced by others."""
    size: int = 0
    """The number of ranks with which an elastic world began; 0 in others."""


class Heartbeat(Struct, frozen=True):
    """Both ways. From a rank it says what the rank is doing."""

    status: OperationStatus | None = None


class Leave(Struct, frozen=True):
    """This rank closed its world on purpose."""


class Leaving(Struct, frozen=True):
    """This rank is about to close its channels, and then its world. Whoever misses it later misses it for that."""


class Left(Struct, frozen=True):
    """Another rank closed its world on purpose."""

    rank: int


class Lost(Struct, frozen=True):
    """A rank is gone without a word. In an elastic world also one that raised: the others go on."""

    rank: int
    reason: str
    traceback: str = ""


class Abort(Struct, frozen=True):
    """A rank ends the world for all."""

    rank: int
    reason: str
    traceback: str
    peer: int | None = None
    """The rank without which it cannot go on, if that is why."""
    on_purpose: bool = False
    """True if the program asked for it: then an elastic world ends, too."""


class Ended(Struct, frozen=True):
    """A launcher saw the process of a rank end without a failure. Only a rank that has not joined makes it news."""

    rank: int
    how: str


class Break(Struct, frozen=True):
    """A rank found one group broken."""

    context: bytes
    rank: int
    cause: EncodedError


class StatusQuery(Struct, frozen=True):
    """Asks all ranks for their status in this group."""

    query: int
    context: bytes
    sequence: int = 0
    """A rank that has got so far tells of this collective instead of what it does now."""


class StatusReply(Struct, frozen=True):
    """The status of this rank in that group."""

    query: int
    status: OperationStatus


class Statuses(Struct, frozen=True):
    """The answers that came in time. For the other ranks, their last known status and its age."""

    query: int
    replies: dict[int, OperationStatus]
    silent: dict[int, tuple[float, OperationStatus | None]]


class Regroup(Struct, frozen=True):
    """A rank has stopped using a group, and asks for the next view of it."""

    context: bytes
    """The context of the group; empty for a rank that is in none yet, and wants to join the world."""
    epoch: int
    members: list[int]
    seconds: float
    """The time in which all members must have asked. Those that have not are voted out."""
    minimum: int = 1
    """The fewest members that the next view may have."""
    joins: bool = False
    """True if ranks that wait may come in with this view."""
    is_world: bool = False
    """True if the group is all of the world: who is voted out of it, is out of the world."""


class View(Struct, frozen=True):
    """The next view of a group, as the directory has decided. There is at most one for each context."""

    context: bytes
    """The context under which it was asked for."""
    base: bytes
    """The context of the group that it follows; the same, but for a rank that joins."""
    epoch: int
    members: list[int]
    joined: list[int] = []
    """Those of the members that were not in the group before."""
    out: list[int] = []
    """Members of the group that are alive, but were voted out."""
    roster: list[Member] = []
    """The members that the receiver may not know yet."""


class Refused(Struct, frozen=True):
    """There is no next view of a group yet, and there may be none."""

    context: bytes
    reason: str
    missing: list[int]
    """The members that did not ask in time."""
    over: bool = False
    """True if there is nothing left to join."""


class Evict(Struct, frozen=True):
    """A rank was voted out of a group."""

    context: bytes
    reason: str
    is_world: bool


class Arrivals(Struct, frozen=True):
    """The number of ranks that wait to join the world."""

    count: int


class Note(Struct, frozen=True):
    """A line for the screen of the launcher."""

    text: str
    kind: Literal["formed", "lost", "voted out", "arrived", "turned away", "view", "over"] = "view"
    rank: int | None = None
    """The rank that this is about."""


class SlateQuery(Struct, frozen=True):
    """Asks all ranks for their slates."""

    query: int


class SlateRanks(Struct, frozen=True):
    """The ranks that were asked."""

    query: int
    world_size: int
    ranks: list[int]


class SlateReply(Struct, frozen=True):
    """The slate of a rank. First comes one without data, so that the clock is as fresh as can be."""

    query: int
    clock_ns: int
    data: bytes = b""
    """Compressed by zlib."""
    rank: int = -1
    """Filled in by the directory, which knows who says it."""


class Shutdown(Struct, frozen=True):
    """The directory ends on purpose. Ranks are not watched any more; channels go on."""


Message = (
    Join
    | Welcome
    | Waiting
    | Roster
    | Heartbeat
    | Leave
    | Leaving
    | Left
    | Lost
    | Abort
    | Ended
    | Break
    | StatusQuery
    | StatusReply
    | Statuses
    | Regroup
    | View
    | Refused
    | Evict
    | Arrivals
    | Note
    | SlateQuery
    | SlateRanks
    | SlateReply
    | Shutdown
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_error_decoder = msgspec.msgpack.Decoder(EncodedError)


def pack(message: msgspec.Struct) -> bytes:
    """The bytes of one message."""
    body = _encode(message)
    return _LENGTH.pack(len(body)) + body


def pack_error(error: EncodedError) -> bytes:
    """The bytes of an encoded error, for the description of a frame."""
    return _encode(error)


def _encode(message: msgspec.Struct) -> bytes:
    """The body of a message. Its texts may be the user's: reasons, tracebacks, names of files and hosts."""
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:  # a lone surrogate, as any badly named file has
        return _encoder.encode(_printable(msgspec.to_builtins(message, builtin_types=(bytes,))))


def _printable(value: Any) -> Any:
    """The value with the lone surrogates of all its texts escaped."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list | tuple):
        return [_printable(item) for item in value]
    if isinstance(value, dict):
        return {key: _printable(item) for key, item in value.items()}
    return value


def parse_error(data: bytes) -> EncodedError:
    """Reads what `pack_error` wrote.

    Raises:
        ProtocolError: The bytes are not an encoded error.
    """
    try:
        return _error_decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"not an encoded error: {error}") from None


M = TypeVar("M")


class MessageReader(Generic[M]):
    """Turns a stream of bytes into messages.

    Args:
        decoder: Knows the messages that may come.
        limit: Bytes in one message.
    """

    def __init__(self, decoder: msgspec.msgpack.Decoder[M], limit: int) -> None:
        self._buffer = bytearray()
        self._decoder = decoder
        self._limit = limit

    def feed(self, data: bytes | memoryview) -> Iterator[M]:
        """Takes what came; yields the messages that are complete.

        Raises:
            ProtocolError: The bytes are no control message, or one that is too long.
        """
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > self._limit:
                raise ProtocolError(f"a control message announces {length} bytes (at most {self._limit} are allowed)")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            try:
                message = self._decoder.decode(body)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                raise ProtocolError(f"not a control message: {error}") from None
            yield message


class ControlReader(MessageReader[Message]):
    """Reads what comes over a control connection."""

    def __init__(self, limit: int = MAX_CONTROL) -> None:
        super().__init__(_decoder, limit)
