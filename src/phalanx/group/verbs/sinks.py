"""Sinks of point-to-point receives: each takes the payload of one message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from ...errors import ProtocolError, SizeMismatch, UsageError
from ...transports.mailbox import Envelope, Sink
from ...wire import codec
from ...wire.frames import FrameKind
from ..data.arrays import Adapted, Description, empty, empty_on_gpu, make, memory_of, to_host
from ..data.typed import PLAIN_DATA, ObjectType

__all__ = ["ArraySink", "Borrow", "Lent", "NewArraySink", "ObjectSink"]


Naming = Callable[[Envelope], int]
"""Tells the world rank that a message came from, for errors."""


class Lent(msgspec.Struct, frozen=True, array_like=True):
    """The description of an array on a GPU that its sender lends: the receiver takes it from there."""

    description: bytes
    number: int
    """By which the receiver says that it is done."""
    offer: bytes
    """As `phalanx.cuda.lending` has it."""

    def pack(self) -> bytes:
        """The bytes of a frame's description."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def parse(cls, data: bytes) -> Lent:
        """Reads it.

        Raises:
            ProtocolError: It is malformed.
        """
        try:
            return _decode_lent(data)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"malformed offer of an array on a GPU: {error}") from None


_decode_lent = msgspec.msgpack.Decoder(Lent).decode

Borrow = Callable[[Envelope, Lent, Any], None]
"""Copies an array that was lent to one of this rank's, on a GPU or on the host."""


def _expect(envelope: Envelope, kind: FrameKind, verb: str, src: int) -> None:
    if envelope.kind is not kind:
        kinds = {FrameKind.ARRAY: "an array", FrameKind.LENT: "an array", FrameKind.OBJECT: "an object"}
        sent = kinds.get(envelope.kind, envelope.kind.name)
        raise UsageError(
            f"rank {src} sent {sent} with tag {envelope.tag}, but this rank called {verb} "
            f"(expected recv for arrays, recv_object for objects); the message is dropped",
            peer=src,
            operation=verb,
        )


def _describe(envelope: Envelope, lent: Lent | None, src: int) -> Description:
    try:
        if lent is not None:
            return Description.parse(lent.description, None)
        return Description.parse(envelope.description, envelope.size)
    except ProtocolError as error:
        raise ProtocolError(f"from rank {src}: {error}", peer=src) from None


def _lent(envelope: Envelope, src: int) -> Lent | None:
    """The offer in a message; None if it has the array itself."""
    if envelope.kind is not FrameKind.LENT:
        _expect(envelope, FrameKind.ARRAY, "recv", src)
        return None
    try:
        return Lent.parse(envelope.description)
    except ProtocolError as error:
        raise ProtocolError(f"from rank {src}: {error}", peer=src) from None


class ArraySink(Sink):
    """An array of the receiver's, to be filled by one of the same dtype and number of elements.

    From a ferrotorch rank come bytes of an unknown dtype: then only their number must fit. An array on a GPU has memory
    of the host as soon as a message needs it.
    """

    takes_plain_bytes = True

    def __init__(self, target: Adapted, naming: Naming, borrow: Borrow) -> None:
        self._target = target
        self._naming = naming
        self._borrow = borrow
        self._filled = target if target.empty is None else None
        self._offered: tuple[Envelope, Lent] | None = None

    @property
    def on_host(self) -> Adapted | None:
        """The array, if it has memory of the host by now."""
        return self._filled

    def _memory(self) -> memoryview:
        if self._filled is None:
            self._filled = to_host(self._target, write=True, read=False)
        return self._filled.bytes

    def open(self, envelope: Envelope) -> memoryview:
        src = self._naming(envelope)
        if envelope.kind is FrameKind.RAW:
            if envelope.size != self._target.array.nbytes:
                raise SizeMismatch(self._target.array.nbytes, envelope.size, peer=src)
            return self._memory()
        lent = _lent(envelope, src)
        sent = _describe(envelope, lent, src)
        size = sent.nbytes
        mine = self._target.description
        if size != self._target.array.nbytes:
            raise SizeMismatch(
                self._target.array.nbytes,
                size,
                f"rank {src} sent {sent} ({size} bytes), but out is {mine} ({self._target.array.nbytes} bytes)",
                peer=src,
            )
        if sent.dtype != mine.dtype:
            raise UsageError(f"rank {src} sent {sent}, but out is {mine} (expected the same dtype)", peer=src)
        if lent is not None:
            self._offered = envelope, lent
            return memoryview(bytearray())
        self._offered = None
        return self._memory()

    def result(self) -> Any:
        """The receiver's array."""
        if self._offered is not None:
            self._borrow(*self._offered, self._target.array)
            return self._target.finish()
        assert self._filled is not None
        return self._filled.finish()


class NewArraySink(Sink):
    """A new array of the sender's dtype and shape."""

    def __init__(self, naming: Naming, borrow: Borrow, limit: int) -> None:
        self._naming = naming
        self._borrow = borrow
        self._limit = limit
        """Bytes that a message may have."""
        self._description: Description | None = None
        self._array: Any = None
        self._offered: tuple[Envelope, Lent] | None = None

    def open(self, envelope: Envelope) -> memoryview:
        src = self._naming(envelope)
        lent = _lent(envelope, src)
        self._description = _describe(envelope, lent, src)
        self._offered = None if lent is None else (envelope, lent)
        if self._description.nbytes > self._limit:
            raise ProtocolError(f"from rank {src}: {self._description} is longer than a message may be", peer=src)
        if lent is not None:
            return memoryview(bytearray())
        self._array = empty(self._description.shape, self._description.numpy_dtype())
        return memory_of(self._array)

    def result(self) -> Any:
        """The new array."""
        assert self._description is not None
        if self._offered is None:
            return make(self._description, self._array)
        made = empty_on_gpu(self._description)
        self._array = empty(self._description.shape, self._description.numpy_dtype()) if made is None else made.array
        self._borrow(*self._offered, self._array)
        return make(self._description, self._array) if made is None else made.finish()


class ObjectSink(Sink):
    """An object; its arrays are received in place."""

    def __init__(
        self, limits: codec.Limits, naming: Naming, expected: ObjectType = PLAIN_DATA, *, allow_pickle: bool
    ) -> None:
        self._naming = naming
        self._expected = expected
        self._src = -1
        self._limits = limits
        self._allow_pickle = allow_pickle
        self._plan: codec.DecodePlan | None = None
        self._target: memoryview | None = None

    def open(self, envelope: Envelope) -> memoryview:
        src = self._naming(envelope)
        _expect(envelope, FrameKind.OBJECT, "recv_object", src)
        try:
            self._plan = codec.decode_head(
                envelope.description,
                payload_bytes=envelope.size,
                limits=self._limits,
                allow_pickle=self._allow_pickle,
                typed=self._expected.is_given,
            )
        except ProtocolError as error:
            raise ProtocolError(f"from rank {src}: {error}", peer=src) from None
        self._src = src
        self._target = self._plan.allocate()
        return self._target

    def result(self) -> Any:
        """The object."""
        assert self._plan is not None
        return self._expected.convert(self._plan.build(self._target), self._src)
