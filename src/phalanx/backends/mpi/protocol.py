"""The heads of messages through MPI: what the ranks say to each other.

A message is announced by a head on a communicator of its own, found by matched probe from anyone: the head names the
lane and carries tag, kind and description, so tags have 63 bits and a sub-group needs nobody's consent. A short payload
travels inside the head. A longer one stays where it is until the receiver has a place for it and says so; then it goes
from the sender's memory straight into the receiver's. What was not asked for yet can still be taken back: a receive
that has asked for it meanwhile waits for the next message. A rank that has asked for a message which no receive waits
for, or whose group it closes, has its background thread take the body: the sender waits until then.

Messages of plain arrays are sent and received by the core (cpp/bindings/mpi_messages.hpp), which speaks the same words
and leaves to `handover` what takes long. Of those that the call does not wait for, short ones are sent at once, and
longer ones offered at once; the rest is done by a thread that waits for one of them. Until then, or until the
background thread takes it over, such a message is known to `Inbox.prepared` only.

```
sender                                      receiver
MESSAGE lane, header, description, payload  ->            all of it, if it is short
OFFER   lane, header, description, sizes    ->
                                            <-  READY     its receives are posted
body, one send for each part                ->
                                            <-  DROP      instead of READY: the lane or the receive is gone
CUT                                         ->            instead of the body: the sender gave up
GOODBYE lane                                ->            the sender has closed the lane
```
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import NamedTuple

from ...config import Options
from ...errors import ProtocolError
from ...transports.mailbox import Envelope
from ...transports.stream import Buffer
from ...wire.frames import HEADER_SIZE, FrameHeader, parse_header

__all__ = ["INLINE", "Head", "Word", "pack_message", "pack_offer", "pack_word", "parse_message", "parse_offer"]

INLINE = 2048
"""Bytes of a payload that travel inside the head: short enough for every MPI to send them without asking first."""

_WORD = struct.Struct("<B8s16sQ")
"""The word, the world, the lane, and the sender's number of the message, which is also the tag of its body."""


class Word(enum.IntEnum):
    """The kind of a head."""

    MESSAGE = 1
    OFFER = 2
    READY = 3
    DROP = 4
    CUT = 5
    GOODBYE = 6


class Head(NamedTuple):
    """A head that has arrived."""

    src: int
    """The world rank that sent it."""
    word: int
    world: bytes
    lane: bytes
    number: int
    data: memoryview
    """All bytes of the head."""

    @classmethod
    def parse(cls, src: int, data: bytearray) -> Head:
        """A head from its bytes."""
        word, world, lane, number = _WORD.unpack_from(data)
        return cls(src, word, world, lane, number, memoryview(data))


def pack_word(word: Word, world: bytes, lane: bytes, number: int = 0) -> bytes:
    """A head that says one word and nothing else."""
    return _WORD.pack(word, world, lane, number)


def pack_message(world: bytes, lane: bytes, header: bytes, description: bytes, parts: Sequence[Buffer]) -> bytes:
    """A head with a whole message."""
    return b"".join([pack_word(Word.MESSAGE, world, lane), header, description, *parts])


def pack_offer(
    world: bytes, lane: bytes, number: int, header: bytes, description: bytes, parts: Sequence[Buffer]
) -> bytes:
    """A head that offers a message whose body follows in these parts."""
    sizes = struct.pack(f"<H{len(parts)}Q", len(parts), *map(len, parts))
    return b"".join([pack_word(Word.OFFER, world, lane, number), header, sizes, description])


def parse_message(head: Head, limits: Options) -> tuple[Envelope, memoryview]:
    """The envelope and the payload of a MESSAGE."""
    header = _header_of(head, limits)
    start = _WORD.size + HEADER_SIZE
    end = start + header.description
    return _envelope(head, header, start), head.data[end:]


def parse_offer(head: Head, limits: Options) -> tuple[Envelope, tuple[int, ...]]:
    """The envelope of an OFFER, and the size of each part of its body.

    Raises:
        ProtocolError: The parts have other bytes than the message.
    """
    at = _WORD.size + HEADER_SIZE
    (count,) = struct.unpack_from("<H", head.data, at)
    sizes: tuple[int, ...] = struct.unpack_from(f"<{count}Q", head.data, at + 2)
    envelope = _envelope(head, _header_of(head, limits), at + 2 + 8 * count)
    if sum(sizes) != envelope.size:
        raise ProtocolError(
            f"rank {head.src} offers a message of {envelope.size} bytes whose parts have {sum(sizes)}", peer=head.src
        )
    return envelope, sizes


def _header_of(head: Head, limits: Options) -> FrameHeader:
    data = head.data[_WORD.size : _WORD.size + HEADER_SIZE]
    return parse_header(data, max_message=limits.max_message, max_object=limits.max_object)


def _envelope(head: Head, header: FrameHeader, start: int) -> Envelope:
    description = bytes(head.data[start : start + header.description])
    return Envelope(head.src, header.kind, header.tag, description, header.payload)
