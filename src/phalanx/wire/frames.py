"""The frame: a fixed header, a few bytes that describe the payload, and the payload. No I/O.

```
offset  size  field
0       2     magic "PX"
2       1     kind: RAW, ARRAY, OBJECT, STEP, GOODBYE, BROKEN, RING, LENT or TAKEN
3       1     0
4       4     length of the description (u32)
8       8     tag of a message, fingerprint of a collective's step (u64)
16      8     length of the payload (u64)
```

All integers are little endian. A channel belongs to one lane of one group, so a frame names neither.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from ..errors import ProtocolError

__all__ = ["HEADER_SIZE", "MAX_DESCRIPTION", "MAX_TAG", "FrameHeader", "FrameKind", "pack_header", "parse_header"]

_HEADER = struct.Struct("<2sBBIQQ")
HEADER_SIZE = _HEADER.size
MAX_DESCRIPTION = 4096
"""Bytes that may describe an array. An object's description is its structure and has a limit of its own."""
MAX_TAG = (1 << 63) - 1

_MAGIC = b"PX"


class FrameKind(enum.IntEnum):
    """The contents of a frame."""

    RAW = 1
    """Bytes whose length the receiver knows: what `Backend.send` sends."""
    ARRAY = 2
    """An array; the description says dtype and shape."""
    OBJECT = 3
    """An object; the description is its structure, the payload its arrays."""
    STEP = 4
    """One transfer of a collective; the tag is the operation's fingerprint."""
    GOODBYE = 5
    """The sender closed its group: nothing follows."""
    BROKEN = 6
    """The sender found its group broken, the description says why: nothing follows."""
    RING = 7
    """With a description: the sender offers a ring in shared memory. Without: what follows is in that ring."""
    LENT = 8
    """An array on a GPU that the receiver can open; the description says dtype, shape, and where it is."""
    TAKEN = 9
    """The receiver of such an array is done with it; the tag is above `MAX_TAG`."""


_KINDS = {kind.value: kind for kind in FrameKind}
_WITHOUT_PAYLOAD = {
    FrameKind.BROKEN: "a last word",
    FrameKind.RING: "the offer of a ring",
    FrameKind.LENT: "the offer of an array",
    FrameKind.TAKEN: "the answer to an offer",
}


class FrameHeader(NamedTuple):
    """A parsed header."""

    kind: FrameKind
    tag: int
    description: int
    payload: int


def pack_header(kind: FrameKind, tag: int, description: int, payload: int) -> bytes:
    """The 24 bytes that go before a description and a payload of these lengths."""
    return _HEADER.pack(_MAGIC, kind, 0, description, tag, payload)


def parse_header(data: bytes | bytearray | memoryview, *, max_message: int, max_object: int) -> FrameHeader:
    """Reads a header and checks every length against its bound, before anything is allocated for it.

    Raises:
        ProtocolError: The bytes are not a header, or announce more than allowed.
    """
    try:
        magic, kind_value, zero, description, tag, payload = _HEADER.unpack(data)
    except struct.error:
        raise ProtocolError(f"not a frame: {len(data)} bytes (a header has {HEADER_SIZE})") from None
    kind = _KINDS.get(kind_value)
    if magic != _MAGIC or zero != 0 or kind is None:
        raise ProtocolError(f"not a frame: {bytes(data).hex()}")
    bound = max_object if kind is FrameKind.OBJECT else MAX_DESCRIPTION
    if description > bound:
        raise ProtocolError(f"a frame announces a description of {description} bytes (at most {bound} are allowed)")
    if payload > max_message:
        raise ProtocolError(f"a frame announces a payload of {payload} bytes (at most {max_message} are allowed)")
    if kind is FrameKind.GOODBYE and (description or payload):
        raise ProtocolError(f"a goodbye announces {description + payload} bytes (expected 0)")
    if kind in _WITHOUT_PAYLOAD and payload:
        word = _WITHOUT_PAYLOAD[kind]
        raise ProtocolError(f"{word} announces a payload of {payload} bytes (expected 0)")
    return FrameHeader(kind, tag, description, payload)
