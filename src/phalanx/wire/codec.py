"""Objects as bytes, and back without trust. No I/O.

An object becomes a *head*, its structure in MessagePack, and a list of *buffers*, the memory of its arrays, which is
not copied. The receiver reads the head first, checks all of it, and only then allocates what the payload needs:

```python
encoded = encode(obj)                              # send encoded.head, then each of encoded.buffers
plan = decode_head(head, payload_bytes=n)          # everything is checked here
target = plan.allocate()                           # receive the payload straight into this
obj = plan.build(target)                           # its arrays are writable views of the target
```

What MessagePack has no word for travels as one of its extensions (`packing.Code`), so plain data is never walked when
it is read. Buffers lie in the payload in the order in which the head names them, each at a multiple of 64 bytes.
All arrays of one object share one allocation: to keep one alive is to keep the memory of all.

An object arrives as equal values of the same types. Two places that held the same list hold two lists afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.arguments import in_units
from phalanx.errors import ProtocolError, UsageError

from .packing import SIMPLE, CannotSend, HeadWriter, Limits, Structs, allocate, pack, pack_plain
from .unpacking import HeadReader, Part, check_depth, read_plain

__all__ = ["DecodePlan", "Encoded", "Limits", "decode", "decode_head", "encode"]

_DEFAULT = Limits()


@dataclass(slots=True)
class Encoded:
    """An object that is ready to be sent: the head, then the buffers in order."""

    head: bytes
    buffers: list[memoryview]
    """The memory of the arrays and the padding between them. No copy: leave the arrays alone until it is sent."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of all buffers, as `decode_head` wants to know them."""
        return sum(map(len, self.buffers))

    @property
    def nbytes(self) -> int:
        """Bytes of the head and all buffers."""
        return len(self.head) + self.payload_bytes


def encode(obj: Any, *, allow_pickle: bool = False, limits: Limits = _DEFAULT, structs: Structs = None) -> Encoded:
    """Turns an object into bytes.

    Args:
        obj: None, bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, OrderedDict, set, frozenset,
            datetime, date, time, timedelta, Decimal, UUID, NumPy arrays and scalars, torch tensors on the CPU. Not
            their subclasses, whose type would be lost.
        allow_pickle: Pickle everything else. The receiver must allow it, too.
        limits: What the receiver will accept.
        structs: `"plain"` writes dataclasses and `msgspec.Struct`s as maps from field to value, members of an enum as
            their values and named tuples as tuples: the receiver must know the types to get them back. `"typed"` writes
            the same with the name of each type, so that a receiver which does not know them is told so.

    Raises:
        UsageError: There is something else in the object (the message says what and where), it contains itself, or it
            is larger than the limits. `UnsupportedArray` for arrays of objects and the like.
    """
    plain = pack_plain(obj, limits.max_depth)
    if plain is not None and len(plain) <= limits.max_head:
        return Encoded(plain, [])
    writer = HeadWriter(allow_pickle, limits, SIMPLE, structs)
    try:
        try:
            head = pack(writer.value(obj))
        except (OverflowError, UnicodeEncodeError):
            # An integer beyond 64 bits or a lone surrogate somewhere: look at every single value this time.
            writer = HeadWriter(allow_pickle, limits, SIMPLE - {int, str}, structs)
            head = pack(writer.value(obj))
    except CannotSend as refused:
        raise refused.error() from refused.__cause__
    except RecursionError:
        raise UsageError("cannot send this object: it is nested too deeply for the stack") from None
    except (OverflowError, UnicodeEncodeError) as error:  # four GiB of text, a surrogate in the name of a field
        raise UsageError(f"cannot send this object: {error}") from None
    if len(head) > limits.max_head:
        raise UsageError(
            f"cannot send this object: its structure takes {in_units(len(head))}, and {in_units(limits.max_head)} are "
            f"allowed (put large data into arrays{_or(limits) if limits.max_head < _DEFAULT.max_head else ''})"
        )
    if writer.offset > limits.max_payload:
        raise UsageError(
            f"cannot send this object: its arrays take {in_units(writer.offset)}, and {in_units(limits.max_payload)} "
            f"are allowed (send it in parts{_or(limits)})"
        )
    if writer.arrays > limits.max_arrays:
        raise UsageError(
            f"cannot send this object: it has {writer.arrays} arrays, and {limits.max_arrays} are allowed (join them, "
            "or send it in parts)"
        )
    return Encoded(head, writer.buffers)


def _or(limits: Limits) -> str:
    return f", or raise the limit: {limits.raised_by}" if limits.raised_by else ""


class DecodePlan:
    """A head that was checked, and where its arrays will lie. Made by `decode_head`."""

    __slots__ = ("_head", "_parts", "_reader", "_value", "payload_bytes")

    def __init__(self, payload_bytes: int, head: bytes, reader: HeadReader, value: Any) -> None:
        self.payload_bytes = payload_bytes
        self._head = head
        self._reader = reader
        self._parts: list[Part] = reader.parts
        self._value = value

    @property
    def outline(self) -> Any:
        """The object with stand-ins for its arrays: to look at its shape before anything is allocated."""
        return self._value

    def allocate(self) -> memoryview:
        """Memory for the payload: `payload_bytes` writable bytes that begin at a multiple of 64."""
        if not self.payload_bytes:
            return memoryview(bytearray())
        return allocate(self.payload_bytes)

    def build(self, target: memoryview | bytearray | None = None) -> Any:
        """The object. Its arrays are views of the target, which is theirs from now on. To be called once.

        Args:
            target: What `allocate` gave, now holding the payload; may be left out if the payload is empty.

        Raises:
            ProtocolError: The payload is not one of such arrays.
            UsageError: The target has another size, or something that was pickled cannot be loaded here.
            BackendUnavailable: A tensor came of a dtype that needs torch, which is not installed here.
        """
        size = 0 if target is None else memoryview(target).nbytes
        if size != self.payload_bytes:
            raise UsageError(f"the target has {size} bytes (expected {self.payload_bytes}, as many as the payload)")
        if not self._parts and not self._reader.pickled:
            return self._value
        memory = np.frombuffer(target, np.uint8) if target else np.empty(0, np.uint8)
        made = [part.make(memory[part.offset : part.offset + part.nbytes], *part.how) for part in self._parts]
        return self._reader.read(self._head, iter(made))


def decode_head(
    head: bytes | bytearray | memoryview,
    *,
    payload_bytes: int,
    limits: Limits = _DEFAULT,
    allow_pickle: bool = False,
    typed: bool = False,
) -> DecodePlan:
    """Checks a head that came from another rank; nothing is unpickled and nothing allocated for its arrays yet.

    Args:
        head: What came; a buffer that will be used again is copied.
        payload_bytes: How many bytes of arrays the frame announces.
        limits: What an object may need at most.
        allow_pickle: Whether something pickled may be in it.
        typed: Whether objects of the sender's types may be in it. They come as plain data.

    Raises:
        ProtocolError: The head is malformed, does not fit the payload, or exceeds the limits.
        UsageError: Something in it is pickled, and `allow_pickle` is not set; or of a type of the sender's, and `typed`
            is not. The payload still has to be read.
    """
    head = bytes(head)
    if len(head) > limits.max_head or not 0 <= payload_bytes <= limits.max_payload:
        raise ProtocolError(
            f"an object of {in_units(len(head))} of structure and {in_units(payload_bytes)} of arrays is too large "
            f"(at most {in_units(limits.max_head)} and {in_units(limits.max_payload)}{_or(limits)})"
        )
    reader = HeadReader(limits)
    value = reader.read(head)
    check_depth(head, value, limits.max_depth)
    if reader.offset != payload_bytes:
        raise ProtocolError(f"the arrays of an object take {reader.offset} bytes, but its payload has {payload_bytes}")
    if reader.pickled and not allow_pickle:
        raise UsageError(
            "this object was sent with allow_pickle=True; to receive it, say allow_pickle=True here too, but only if "
            "you trust the sender: to unpickle is to run its code"
        )
    if reader.typed and not typed:
        raise UsageError(
            f"this object is or holds a {reader.typed} of the sender's; to receive it, name its type here: "
            f"type={reader.typed}, or type=list[{reader.typed}] and so on"
        )
    return DecodePlan(payload_bytes, head, reader, value)


def decode(
    head: bytes | bytearray | memoryview,
    payload: bytes | bytearray | memoryview = b"",
    *,
    limits: Limits = _DEFAULT,
    allow_pickle: bool = False,
    typed: bool = False,
) -> Any:
    """The object of a head and a payload that is already in memory; the payload is copied.

    Raises:
        ProtocolError, UsageError, BackendUnavailable: As `decode_head` and `DecodePlan.build`.
    """
    if not payload and type(head) is bytes and len(head) <= limits.max_head:
        is_plain, value = read_plain(head, limits.max_depth)
        if is_plain:
            return value
    plan = decode_head(head, payload_bytes=len(payload), limits=limits, allow_pickle=allow_pickle, typed=typed)
    target = plan.allocate()
    target[:] = payload
    return plan.build(target)
