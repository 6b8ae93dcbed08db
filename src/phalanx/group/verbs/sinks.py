"""Sinks of point-to-point receives: each takes the payload of one message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...errors import ProtocolError, SizeMismatch, UsageError
from ...transports.mailbox import Envelope, Sink
from ...wire import codec
from ...wire.frames import FrameKind
from ..data.arrays import Adapted, Description, empty, make, memory_of
from ..data.typed import PLAIN_DATA, ObjectType

__all__ = ["ArraySink", "NewArraySink", "ObjectSink"]


Naming = Callable[[Envelope], int]
"""Tells the world rank that a message came from, for errors."""


def _expect(envelope: Envelope, kind: FrameKind, verb: str, src: int) -> None:
    if envelope.kind is not kind:
        sent = {FrameKind.ARRAY: "an array", FrameKind.OBJECT: "an object"}.get(envelope.kind, envelope.kind.name)
        raise UsageError(
            f"rank {src} sent {sent} with tag {envelope.tag}, but this rank called {verb} "
            f"(expected recv for arrays, recv_object for objects); the message is dropped",
            peer=src,
            operation=verb,
        )


def _describe(envelope: Envelope, src: int) -> Description:
    try:
        return Description.parse(envelope.description, envelope.size)
    except ProtocolError as error:
        raise ProtocolError(f"from rank {src}: {error}", peer=src) from None


class ArraySink(Sink):
    """An array of the receiver's, to be filled by one of the same dtype and number of elements.

    From a ferrotorch rank come bytes of an unknown dtype: then only their number must fit.
    """

    takes_plain_bytes = True

    def __init__(self, target: Adapted, naming: Naming) -> None:
        self._target = target
        self._naming = naming

    def open(self, envelope: Envelope) -> memoryview:
        src = self._naming(envelope)
        if envelope.kind is FrameKind.RAW:
            if envelope.size != self._target.array.nbytes:
                raise SizeMismatch(self._target.array.nbytes, envelope.size, peer=src)
            return self._target.bytes
        _expect(envelope, FrameKind.ARRAY, "recv", src)
        sent = _describe(envelope, src)
        mine = self._target.description
        if envelope.size != self._target.array.nbytes:
            raise SizeMismatch(
                self._target.array.nbytes,
                envelope.size,
                f"rank {src} sent {sent} ({envelope.size} bytes), but out is {mine} "
                f"({self._target.array.nbytes} bytes)",
                peer=src,
            )
        if sent.dtype != mine.dtype:
            raise UsageError(f"rank {src} sent {sent}, but out is {mine} (expected the same dtype)", peer=src)
        return self._target.bytes

    def result(self) -> Any:
        """The receiver's array."""
        return self._target.finish()


class NewArraySink(Sink):
    """A new array of the sender's dtype and shape."""

    def __init__(self, naming: Naming) -> None:
        self._naming = naming
        self._description: Description | None = None
        self._array: Any = None

    def open(self, envelope: Envelope) -> memoryview:
        src = self._naming(envelope)
        _expect(envelope, FrameKind.ARRAY, "recv", src)
        self._description = _describe(envelope, src)
        self._array = empty(self._description.shape, self._description.numpy_dtype())
        return memory_of(self._array)

    def result(self) -> Any:
        """The new array."""
        assert self._description is not None
        return make(self._description, self._array)


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
