"""Messages of objects other than arrays between two ranks of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from ...deadline import Deadline
from ...errors import PhalanxError
from ...frames import hides_frames
from ...types import Received
from ...wire import codec
from ...wire.frames import FrameKind
from ..data.typed import ObjectType
from ..work import Work
from .message_runner import MessageRunner, receiving, sending
from .sinks import ObjectSink

if TYPE_CHECKING:
    from ..._core import FastMessages

__all__ = ["ObjectMessages"]

T = TypeVar("T")


class ObjectMessages(MessageRunner):
    """`send_object` and `recv_object`. A short object without arrays goes through a ring in one call of the core."""

    @overload
    def send_object(
        self,
        obj: Any,
        dst: int,
        *,
        tag: int = ...,
        allow_pickle: bool = ...,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> None: ...
    @overload
    def send_object(
        self,
        obj: Any,
        dst: int,
        *,
        tag: int = ...,
        allow_pickle: bool = ...,
        timeout: float | None = ...,
        async_op: Literal[True],
    ) -> Work[None]: ...
    @overload
    def send_object(
        self,
        obj: Any,
        dst: int,
        *,
        tag: int = ...,
        allow_pickle: bool = ...,
        timeout: float | None = ...,
        async_op: bool,
    ) -> Work[None] | None: ...

    @hides_frames
    def send_object(
        self,
        obj: Any,
        dst: int,
        *,
        tag: int = 0,
        allow_pickle: bool = False,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Sends data: None, numbers, text, bytes, lists, tuples, dicts, sets, dates and arrays, nested as you like.

        Dataclasses, `msgspec.Struct`s, named tuples and members of an enum can be sent, too, if the receiver names the
        type.

        Args:
            allow_pickle: Pickle everything else. The receiver must allow it, too, and runs the sender's code by it.

        Raises:
            UsageError: There is something else in the object; the message says what and where.
            As `send`.
        """
        dst, tag = self._check_target(dst, tag)
        encoded = codec.encode(obj, allow_pickle=allow_pickle, limits=self._limits, structs="typed")
        deadline = self._deadline(timeout)
        if not async_op and not encoded.buffers:
            fast = self._fast_objects
            if fast is not None and fast.send_object(encoded.head, dst, tag, deadline.remaining()):
                return None
        what = sending("send_object", dst, tag)
        return self._send(what, dst, FrameKind.OBJECT, tag, encoded.head, encoded.buffers, deadline, async_op)

    @overload
    def recv_object(
        self,
        src: int,
        *,
        tag: int = ...,
        type: type[T],
        allow_pickle: bool = ...,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> T: ...
    @overload
    def recv_object(
        self,
        src: int,
        *,
        tag: int = ...,
        type: type[T],
        allow_pickle: bool = ...,
        timeout: float | None = ...,
        async_op: Literal[True],
    ) -> Work[T]: ...
    @overload
    def recv_object(
        self,
        src: None = ...,
        *,
        tag: int = ...,
        type: Any = ...,
        allow_pickle: bool = ...,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> Received: ...
    @overload
    def recv_object(
        self,
        src: None = ...,
        *,
        tag: int = ...,
        type: Any = ...,
        allow_pickle: bool = ...,
        timeout: float | None = ...,
        async_op: Literal[True],
    ) -> Work[Received]: ...
    @overload
    def recv_object(
        self,
        src: int | None = ...,
        *,
        tag: int = ...,
        type: Any = ...,
        allow_pickle: bool = ...,
        timeout: float | None = ...,
        async_op: Literal[True],
    ) -> Work[Any]: ...
    @overload
    def recv_object(
        self,
        src: int | None = ...,
        *,
        tag: int = ...,
        type: Any = ...,
        allow_pickle: bool = ...,
        timeout: float | None = ...,
        async_op: bool = ...,
    ) -> Any: ...

    @hides_frames
    def recv_object(
        self,
        src: int | None = None,
        *,
        tag: int = 0,
        type: Any = None,  # noqa: A002 - the caller knows it as the type
        allow_pickle: bool = False,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Receives what `send_object` sent.

        Args:
            type: The type of the object, if it is more than plain data: a class such as `Config`, or `list[Config]`.
                Only what is named here is made, whatever the sender has. A field that is missing or of another type is
                an error; one that the type does not have is left out, unless it is a Struct that forbids it.

        Returns:
            The object; with `src=None` a `Received(data, src, tag)`.

        Raises:
            UsageError: The object holds something pickled, and `allow_pickle` is not set here; or it does not fit
                `type`, or needs one.
            As `recv`.
        """
        src, tag = self._check_source(src, tag)
        expected = ObjectType(type, allow_pickle=allow_pickle)
        deadline = self._deadline(timeout)
        if not async_op and src is not None:
            received, obj = self._receive_object(src, tag, expected, allow_pickle, deadline)
            if received:
                return obj
        sink = ObjectSink(self._limits, self._naming, expected, allow_pickle=allow_pickle)
        return self._receive(receiving("recv_object", src, tag), src, tag, sink, deadline, async_op)

    @property
    def _fast_objects(self) -> FastMessages | None:
        """The fast path, if it takes objects."""
        fast: Any = self._fast_messages
        return fast if hasattr(fast, "send_object") else None

    def _receive_object(
        self, src: int, tag: int, expected: ObjectType, allow_pickle: bool, deadline: Deadline
    ) -> tuple[bool, Any]:
        """Receives an object by the fast path; whether it did.

        What is no such object stays where it is, and so does one that is refused: the general way takes it, and says
        what is wrong with it.
        """
        fast = self._fast_objects
        coming = None if fast is None else fast.next_object(src, tag, deadline.remaining())
        if fast is None or coming is None:
            return False, None
        head, place = coming
        try:
            value = codec.decode(head, limits=self._limits, allow_pickle=allow_pickle, typed=expected.is_given)
            obj = expected.convert(value, self.members[src])
        except PhalanxError:
            return False, None
        return fast.take_object(src, tag, len(head), place), obj
