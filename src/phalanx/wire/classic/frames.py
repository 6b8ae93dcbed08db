"""The messages of the classic wire, which a rank written in Rust speaks too. No I/O.

```
message          length u64, then the bytes
```

All integers are little endian, and there is no authentication. Phalanx adds one thing, and uses it only between its
own ranks: if bit 63 of a message's length is set, the rest of the length counts the bytes of an *escaped frame*: the
context of a group (16 bytes) and a frame as in `phalanx.wire.frames`.
"""

from __future__ import annotations

import struct

from phalanx.errors import ProtocolError

__all__ = ["BARRIER", "ESCAPE_BIT", "LENGTH_SIZE", "Buffer", "pack_escaped_length", "pack_length", "parse_length"]

Buffer = bytes | bytearray | memoryview

_U64 = struct.Struct("<Q")

LENGTH_SIZE = _U64.size
BARRIER = b"\x00"
"""The message that says "I am here" and "go on"."""
ESCAPE_BIT = 1 << 63


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
    """The number of bytes that follow a message's header, and True if they are an escaped frame.

    Raises:
        ProtocolError: They are more than `max_message`, or the header is not 8 bytes.
    """
    if len(data) != LENGTH_SIZE:
        raise ProtocolError(f"the length of a message has {len(data)} bytes (expected {LENGTH_SIZE})")
    value: int = _U64.unpack(data)[0]
    length, escaped = value & ~ESCAPE_BIT, value >= ESCAPE_BIT
    if length > max_message:
        raise ProtocolError(f"a message announces {length} bytes (at most {max_message} are allowed)")
    return length, escaped


def _checked_length(length: int) -> int:
    if not 0 <= length < ESCAPE_BIT:
        raise ProtocolError(f"a message of {length} bytes cannot be sent (expected 0 to {ESCAPE_BIT - 1})")
    return length
