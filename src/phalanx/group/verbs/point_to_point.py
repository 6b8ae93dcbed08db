"""Messages between two ranks of a group."""

from __future__ import annotations

import time
from typing import Any, Literal, TypeVar, overload

from ...frames import hide_frames, hides_frames
from ...system_limits import naming_limits
from ...transports.ring_channel import last_handed_over
from ...types import AnyArray, OutT, Received
from ...wire.frames import FrameKind
from ..data.arrays import adapt, adapt_out, share_memory, to_host
from ..data.overlap import exchanged
from ..work import Work
from .array_messages import ArrayMessages
from .message_runner import exchanging
from .sinks import ArraySink, NewArraySink

__all__ = ["PointToPoint"]

BUFFERED = 64 << 10
"""Bytes of an array that two ranks can send each other before they receive: rings hold several of them."""
T = TypeVar("T")


class PointToPoint(ArrayMessages):
    """`send`, `recv` and their kin. Ranks are those of the group."""

    # -- arrays --------------------------------------------------------------------------------------------------------

    @overload
    def send(
        self, x: AnyArray, dst: int, *, tag: int = ..., timeout: float | None = ..., async_op: Literal[False] = ...
    ) -> None: ...
    @overload
    def send(
        self, x: AnyArray, dst: int, *, tag: int = ..., timeout: float | None = ..., async_op: Literal[True]
    ) -> Work[None]: ...
    @overload
    def send(
        self, x: AnyArray, dst: int, *, tag: int = ..., timeout: float | None = ..., async_op: bool
    ) -> Work[None] | None: ...

    def send(self, x: Any, dst: int, *, tag: int = 0, timeout: float | None = None, async_op: bool = False) -> Any:
        """Sends an array; returns once its memory may be changed again.

        Args:
            x: NumPy, torch, JAX, CuPy, bytes, bytearray or memoryview. On a GPU it goes by the memory of the host,
                unless it is long and the ranks share that GPU.
            dst: The receiver.
            tag: The receiver gets messages of one tag in the order in which they were sent.
            async_op: Return a `Work` at once; leave `x` alone until it is done.

        Raises:
            InvalidRank, UsageError: Before anything is sent.
            Timeout: The receiver did not take it in time. If a part was on its way, no more can be sent to that rank.
            PeerLost: The receiver is gone.
        """
        try:
            if async_op:
                return self.isend(x, dst, tag=tag, timeout=timeout)
            dst, tag = self._check_target(dst, tag)
            return self._send_array(x, dst, tag, self._deadline(timeout), False)
        except BaseException as error:
            hide_frames(error)
            raise

    @overload
    def recv(
        self, out: OutT, src: int, *, tag: int = ..., timeout: float | None = ..., async_op: Literal[False] = ...
    ) -> OutT: ...
    @overload
    def recv(
        self, out: OutT, src: int, *, tag: int = ..., timeout: float | None = ..., async_op: Literal[True]
    ) -> Work[OutT]: ...
    @overload
    def recv(
        self,
        out: AnyArray | None = ...,
        src: None = ...,
        *,
        tag: int = ...,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> Received: ...
    @overload
    def recv(
        self,
        out: AnyArray | None = ...,
        src: None = ...,
        *,
        tag: int = ...,
        timeout: float | None = ...,
        async_op: Literal[True],
    ) -> Work[Received]: ...
    @overload
    def recv(
        self,
        out: AnyArray | None = ...,
        src: int | None = ...,
        *,
        tag: int = ...,
        timeout: float | None = ...,
        async_op: Literal[True],
    ) -> Work[Any]: ...
    @overload
    def recv(
        self,
        out: AnyArray | None = ...,
        src: int | None = ...,
        *,
        tag: int = ...,
        timeout: float | None = ...,
        async_op: bool = ...,
    ) -> Any: ...

    def recv(
        self,
        out: Any = None,
        src: int | None = None,
        *,
        tag: int = 0,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Receives an array.

        Args:
            out: Is filled and returned; must have the sender's dtype and size. Without it, a new array is made as the
                sender's was.
            src: The sender; None takes a message from anyone.
            async_op: Return a `Work` at once.

        Returns:
            The array; with `src=None` a `Received(data, src, tag)`.

        Raises:
            InvalidRank, UsageError: Before anything is received.
            SizeMismatch: The message has another size than `out`; it is dropped.
            Timeout: Nothing came in time. The group stays usable, and a message that comes later is not lost.
            PeerLost: The sender is gone.
        """
        try:
            if async_op:
                return self.irecv(out, src, tag=tag, timeout=timeout)
            src, tag = self._check_source(src, tag)
            return self._receive_array(out, src, tag, self._deadline(timeout), False)
        except BaseException as error:
            hide_frames(error)
            raise

    def isend(self, x: AnyArray, dst: int, *, tag: int = 0, timeout: float | None = None) -> Work[None]:
        """`send` with `async_op=True`."""
        try:
            return self._send_later(x, dst, tag, timeout)
        except BaseException as error:
            hide_frames(error)
            raise

    @overload
    def irecv(self, out: OutT, src: int, *, tag: int = ..., timeout: float | None = ...) -> Work[OutT]: ...
    @overload
    def irecv(
        self, out: AnyArray | None = ..., src: None = ..., *, tag: int = ..., timeout: float | None = ...
    ) -> Work[Received]: ...
    @overload
    def irecv(
        self, out: AnyArray | None = ..., src: int | None = ..., *, tag: int = ..., timeout: float | None = ...
    ) -> Work[Any]: ...

    def irecv(self, out: Any = None, src: int | None = None, *, tag: int = 0, timeout: float | None = None) -> Any:
        """`recv` with `async_op=True`."""
        try:
            src, tag = self._check_source(src, tag)
            return self._receive_array(out, src, tag, self._deadline(timeout), True)
        except BaseException as error:
            hide_frames(error)
            raise

    @overload
    def sendrecv(
        self, x: AnyArray, dst: int, out: OutT, src: int, *, tag: int = ..., timeout: float | None = ...
    ) -> OutT: ...
    @overload
    def sendrecv(
        self,
        x: AnyArray,
        dst: int,
        out: AnyArray | None = ...,
        src: None = ...,
        *,
        tag: int = ...,
        timeout: float | None = ...,
    ) -> Received: ...
    @overload
    def sendrecv(
        self,
        x: AnyArray,
        dst: int,
        out: AnyArray | None = ...,
        src: int | None = ...,
        *,
        tag: int = ...,
        timeout: float | None = ...,
    ) -> Any: ...

    @hides_frames
    def sendrecv(
        self,
        x: Any,
        dst: int,
        out: Any = None,
        src: int | None = None,
        *,
        tag: int = 0,
        timeout: float | None = None,
    ) -> Any:
        """Sends and receives at the same time, so that two ranks can exchange arrays of any size.

        Args:
            x: As of `send`.
            out: As of `recv`. It may be exactly `x`.

        Returns:
            The same as `recv(out, src, tag=tag)`.

        Raises:
            As `send` and `recv`.
        """
        began = time.monotonic()
        exchange = self._exchange_buffered if self._messages.prepared is None else self._exchange_prepared
        started, received = exchange(x, dst, out, src, tag, timeout)
        if received:
            if started is not True or received is not True:
                self._finish_exchange([started, received], dst, src, tag, began, timeout)
            return out
        dst, tag = self._check_target(dst, tag)
        src, tag = self._check_source(src, tag)
        adapted = adapt(x, write=False)
        self._check_size(adapted.array.nbytes)
        sink: NewArraySink | ArraySink = self._new_sink()
        may_lend = True
        if out is not None:
            target = adapt_out(out)
            may_lend = not share_memory(adapted.array, target.array)  # else what is read would change meanwhile
            adapted = exchanged("sendrecv", adapted, target.array) if adapted.empty is None else adapted
            sink = self._sink_for(target)
        deadline = self._deadline(timeout)
        deadline.at = began + deadline.seconds
        what = exchanging(dst, src, tag)
        if adapted.empty is not None and adapted.array.nbytes <= BUFFERED and isinstance(sink, ArraySink):
            adapted = to_host(adapted, write=False)
            started = self._start_fast(adapted, dst, tag, deadline)
        if started is True and isinstance(sink, ArraySink):
            return self._receive_to(what, sink, src, tag, deadline)
        loan = self._lend(adapted, dst, deadline) if may_lend else None
        entry = self._journal.begin(what, src)
        try:
            receive = self._messages.post(src, tag, sink)
            if loan is not None:
                return self._exchange_lent(entry, adapted, loan, dst, tag, receive, sink, src, deadline)
            host = to_host(adapted, write=False)
            description, payload = host.description.pack(), [host.bytes]
            if isinstance(started, bool):
                with naming_limits():
                    outgoing = self._messages.start_send(dst, FrameKind.ARRAY, tag, description, payload, deadline)
            else:
                outgoing = started
                last_handed_over()
            self._complete(entry, [outgoing, receive], deadline, self._sources(src))
            return self._received(entry, receive, sink, src)
        except BaseException:
            if started:
                self._take_back()
            self._forget(sink)
            entry.end(failed=True)
            raise
