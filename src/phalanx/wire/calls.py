"""The frames of remote calls: a fixed header, a head in MessagePack, and a payload of arrays. No I/O.

```
offset  size  field
0       2     magic "PC"
2       1     kind
3       1     0
4       4     length of the head (u32)
8       8     number of the call on this link (u64); 0 where none is meant
16      8     length of the payload (u64)
```

All integers are little endian. A link has two ends: the caller's, which opened it, and the server's. A caller numbers
its calls; the server's answers repeat the number. Answers come in any order.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from ..errors import ProtocolError

__all__ = [
    "CARRIERS",
    "HEADER_SIZE",
    "CallHeader",
    "CallKind",
    "check_lengths",
    "pack_header",
    "parse_header",
    "split_header",
    "too_long",
]

_HEADER = struct.Struct("<2sBBIQQ")
HEADER_SIZE = _HEADER.size
_MAGIC = b"PC"


class CallKind(enum.IntEnum):
    """The kinds of frames. The caller sends the first group, the server the second, both the third."""

    REQUEST = 1
    """Call a function: name, target, seconds left, arguments. It will be answered."""
    NOTIFY = 2
    """The same without an answer."""
    CANCEL = 3
    """The caller has given this call up, or no longer reads this stream."""
    CREDIT = 4
    """The reader of a stream can take more items: the head is their number."""
    FREE = 5
    """The handle of a remote object is gone: the head is the object's number."""

    RESULT = 16
    """The value that the function returned; of a stream, that it has ended."""
    ERROR = 17
    """The error that the call ended with: kind, type name, message, traceback."""
    STREAM = 18
    """The function yields items, which follow."""
    ITEM = 19
    """An item of a stream."""

    RING = 32
    """Before anything else: the agreement on rings in shared memory; see `transports.duplex_ring`."""
    GOODBYE = 33
    """This side closes its agent: nothing follows."""
    LANES = 34
    """The agreement on further connections for long payloads; see `rpc.lanes`."""


_KINDS = {kind.value: kind for kind in CallKind}
_BARE = frozenset({CallKind.CANCEL, CallKind.GOODBYE})
CARRIERS = {kind.value: kind for kind in (CallKind.REQUEST, CallKind.NOTIFY, CallKind.RESULT, CallKind.ITEM)}
"""The kinds that carry values, by their numbers: their heads and payloads have any length."""


class CallHeader(NamedTuple):
    """A parsed header."""

    kind: CallKind
    head: int
    call: int
    payload: int


def pack_header(kind: int, head: int, call: int, payload: int) -> bytes:
    """The 24 bytes that go before a head and a payload of these lengths."""
    return _HEADER.pack(_MAGIC, kind, 0, head, call, payload)


def split_header(data: bytes | bytearray | memoryview, offset: int) -> tuple[int, int, int, int]:
    """Kind, length of the head, number of the call and length of the payload, as they stand there.

    Raises:
        ProtocolError: The bytes are no header.
    """
    magic, kind, zero, head, call, payload = _HEADER.unpack_from(data, offset)
    if magic != _MAGIC or zero:
        raise ProtocolError(f"not a frame of a remote call: {bytes(data[offset : offset + HEADER_SIZE]).hex()}")
    return kind, head, call, payload


def check_lengths(kind_value: int, head: int, payload: int, max_message: int) -> CallKind:
    """The kind of a frame, if its lengths are possible. To be called before anything is allocated for them.

    Raises:
        ProtocolError: There is no such kind, it announces more than `max_message` bytes, or what it does not have.
    """
    kind = _KINDS.get(kind_value)
    if kind is None:
        raise ProtocolError(f"a frame has the unknown kind {kind_value}")
    if head + payload > max_message:
        raise too_long(head + payload, max_message)
    if (payload and kind not in CARRIERS) or (head and kind in _BARE):
        empty = "both" if kind in _BARE else "the payload"
        raise ProtocolError(
            f"a {kind.name} frame announces a head of {head} and a payload of {payload} bytes (expected 0 for {empty})"
        )
    return kind


def too_long(size: int, max_message: int) -> ProtocolError:
    """The error for a frame that announces too much."""
    return ProtocolError(f"a frame announces {size} bytes (at most {max_message} are allowed)")


def parse_header(data: bytes | bytearray | memoryview, offset: int, max_message: int) -> CallHeader:
    """Reads a header and checks the lengths, before anything is allocated for them.

    Raises:
        ProtocolError: The bytes are no header, or announce more than `max_message` bytes.
    """
    kind, head, call, payload = split_header(data, offset)
    return CallHeader(check_lengths(kind, head, payload, max_message), head, call, payload)
