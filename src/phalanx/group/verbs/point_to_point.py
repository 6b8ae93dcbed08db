"""Messages between two ranks of a group."""

from __future__ import annotations

import time
from typing import Any, Literal, TypeVar, overload

from ...frames import hide_frames
from ...system_limits import naming_limits
from ...transports.mailbox import PendingTransfer
from ...transports.ring_channel import all_handed_over
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
        try:
            started, received = self._exchange_fast(x, dst, out, src, tag, timeout)
            return self._go_on_exchanging(x, dst, out, src, tag, timeout, began, started, received)
        except BaseException as error:
            self._take_back()
            hide_frames(error)
            raise

    def _go_on_exchanging(
        self,
        x: Any,
        dst: int,
        out: Any,
        src: int | None,
        tag: int,
        timeout: float | None,
        began: float,
        started: PendingTransfer | bool,
        received: PendingTransfer | bool,
    ) -> Any:
        """Finishes what the fast path has left of a `sendrecv`. If this raises, the caller takes back what goes on.

        Args:
            began: When, on the monotonic clock.
            started: Whether the fast path has sent the array, or what goes on sending it.
            received: The same of what comes.
        """
        if not received:
            out = self._exchange(x, dst, out, src, tag, timeout, began, started)
        elif started is not True or received is not True:
            self._finish_exchange(x, started, received, dst, src, tag, began, timeout)
        all_handed_over()
        return out

    def _exchange(
        self,
        x: Any,
        dst: int,
        out: Any,
        src: int | None,
        tag: int,
        timeout: float | None,
        began: float,
        started: PendingTransfer | bool,
    ) -> Any:
        """The general way of `sendrecv`.

        Args:
            started: Whether the fast path has sent the array, or what goes on sending it.
        """
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
            self._complete(entry, [outgoing, receive], deadline, self._sources(src))
            return self._received(entry, receive, sink, src)
        except BaseException:
            self._forget(sink)
            entry.end(failed=True)
            raise
