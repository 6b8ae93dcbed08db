"""Runs messages: in the caller's thread, or in the background of the lane."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...arguments import as_index, in_units
from ...backends.lane import payload_size
from ...deadline import Deadline
from ...errors import ChannelClosed, PeerLost, PhalanxError, Timeout, UsageError, copy_for_raise
from ...interrupts import is_of_a_signal
from ...system_limits import naming_limits
from ...transports.channel import OutgoingFrame
from ...transports.mailbox import Envelope, PendingTransfer, Receive
from ...types import Received
from ...wire.frames import MAX_TAG, FrameKind
from ..core import GroupCore
from ..members import as_member
from ..tracking.journal import Entry
from ..work import Work
from .sinks import ArraySink, NewArraySink, ObjectSink

__all__ = ["AnySink", "MessageRunner", "exchanging", "receiving", "sending"]

LOOK = 1.0
"""Seconds after which a wait looks whether it can ever end."""
AnySink = ArraySink | NewArraySink | ObjectSink


class MessageRunner(GroupCore):
    """Checks messages, begins them on the lane, and waits for their end."""

    def _check_target(self, dst: int, tag: int) -> tuple[int, int]:
        self._check()
        rank = as_member(dst, self.world_size)
        self._backend.check_peer(rank)
        expected = f"a whole number from 0 to {MAX_TAG}"
        number = as_index(tag, "tag", expected)
        if not 0 <= number <= MAX_TAG:
            raise UsageError(f"tag={tag!r} is not valid (expected {expected})")
        return rank, number

    def _check_source(self, src: int | None, tag: int) -> tuple[int | None, int]:
        rank, number = self._check_target(self._some_peer if src is None else src, tag)
        return (None if src is None else rank), number

    @property
    def _some_peer(self) -> int:
        return self.rank if self.world_size == 1 or self._backend.self_send else (self.rank + 1) % self.world_size

    def _check_size(self, size: int) -> None:
        limit = self._backend.options.max_message
        if size > limit:
            raise UsageError(
                f"a message of {in_units(size)} is too long (max_message is {in_units(limit)}; Options.max_message or "
                "PHALANX_MAX_MESSAGE raises it)"
            )

    def _send(
        self,
        what: str,
        dst: int,
        kind: FrameKind,
        tag: int,
        description: bytes,
        payload: list[memoryview],
        deadline: Deadline,
        async_op: bool,
    ) -> Work[None] | None:
        entry = self._journal.begin(what, dst, payload_size(payload), posted=async_op)
        try:
            with naming_limits():
                operation = self._messages.start_send(dst, kind, tag, description, payload, deadline)
        except BaseException:
            entry.end(failed=True)
            raise
        if async_op:
            return self._in_background(entry, operation, deadline, [dst], lambda: None)
        self._complete(entry, [operation], deadline, [dst])
        return None

    def _receive(self, what: str, src: int | None, tag: int, sink: AnySink, deadline: Deadline, async_op: bool) -> Any:
        entry = self._journal.begin(what, src, posted=async_op)
        try:
            receive = self._messages.post(src, tag, sink)
            if async_op:
                return self._in_background(
                    entry, receive, deadline, self._sources(src), lambda: self._received(entry, receive, sink, src)
                )
            self._complete(entry, [receive], deadline, self._sources(src))
            return self._received(entry, receive, sink, src)
        except BaseException:
            self._forget(sink)
            entry.end(failed=True)
            raise

    def _forget(self, sink: AnySink) -> None:
        """Takes back the receive of a call that raises: an interrupt may have come before the call knew of it."""
        receive = None if sink.receive is None else sink.receive()
        if receive is not None:
            self._messages.withdraw(receive)

    def _naming(self, envelope: Envelope) -> int:
        """The world rank that a message came from, by which errors name it."""
        return self.members[self._messages.source_of(envelope)]

    def _sources(self, src: int | None) -> list[int]:
        return [src] if src is not None else [rank for rank in range(self.world_size) if rank != self.rank]

    def _received(self, entry: Entry, receive: Receive, sink: AnySink, src: int | None) -> Any:
        """The result of a receive for its caller."""
        try:
            data = sink.result()
        except PhalanxError as error:
            if error is not self._messages.error:
                raise
            raise self._failure(error, entry) from None  # the group has broken while an array was taken
        if src is not None:
            return data
        assert receive.envelope is not None
        return Received(data, self._messages.source_of(receive.envelope), receive.envelope.tag)

    def _complete(
        self,
        entry: Entry,
        operations: list[PendingTransfer],
        deadline: Deadline,
        waiting: list[int],
        *,
        ends: bool = True,
    ) -> None:
        """Waits in the caller's thread. Whatever is not done at the end is taken back.

        Args:
            ends: False if the call goes on if all goes well.
        """
        lane = self._messages
        done = False
        try:
            try:
                with naming_limits():
                    self._wait(operations, deadline, waiting)
                    if any(isinstance(operation.error, UsageError) for operation in operations):
                        # What came does not fit, which is no reason to cut short what is sent.
                        rest = [operation for operation in operations if operation.error is None]
                        self._wait(rest, deadline, waiting)
            finally:  # also after Ctrl-C: nothing may be written to the caller's memory later
                expired = [operation for operation in operations if lane.withdraw(operation)]
            for operation in operations:
                self._dismiss(operation)
            failed = next((operation.error for operation in operations if operation.error is not None), None)
            if failed is not None:
                raise self._failure(failed, entry)
            if expired:
                raise self._message_timed_out(entry, expired[0], deadline, waiting)
            done = True
        finally:
            if ends or not done:
                entry.end(failed=not done)

    def _wait(self, operations: list[PendingTransfer], deadline: Deadline, waiting: list[int]) -> None:
        """Waits until all are done, one has failed, or the deadline has passed.

        Raises:
            OutOfResources: A sender has not connected yet, and this rank has no descriptor left for it.
        """
        lane = self._messages
        while not lane.wait(operations, deadline.sooner(LOOK)) and not deadline.expired:
            trouble = self._control.trouble
            if trouble is not None and not all(lane.inbound(rank) for rank in waiting):
                raise trouble

    def _in_background(
        self,
        entry: Entry,
        operation: PendingTransfer,
        deadline: Deadline,
        waiting: list[int],
        result: Callable[[], Any],
        on_failure: Callable[[], None] = lambda: None,
        first: PendingTransfer | None = None,
        work: Work[Any] | None = None,
    ) -> Work[Any]:
        """Returns at once; the lane's own thread goes on unless the caller waits.

        Args:
            on_failure: Called before the program hears of a failure.
            first: What has to be done before the operation can be.
            work: The handle of the operation, if the caller has one already. That may call this again after an
                interrupt.
        """
        lane = self._messages
        operations = [operation] if first is None else [first, operation]

        def wait(until: Deadline) -> None:
            if self._backend.forked:
                self._backend.check_usable()  # raises: the message is the parent's
            entry.show_message()
            if lane.wait(operations, until) and not handle._done:  # an interrupt has come in the middle of its end
                for one in operations:
                    if one.done:
                        one.announce()

        handle: Work[Any] = Work(entry.name, deadline, drive=wait) if work is None else work
        if work is not None:
            work._go_on(entry.name, deadline, wait)

        def finished() -> None:
            if handle._done:
                handle._finish()
                return
            entry.end(failed=operation.error is not None)
            if operation.error is not None:
                self._dismiss(operation)
                on_failure()
                handle._finish(error=self._failure(operation.error, entry))
                return
            try:
                handle._finish(result())
            except Exception as error:
                if is_of_a_signal(error):
                    raise
                handle._finish(error=error)

        def expire() -> None:
            if lane.withdraw(operation):
                operation.complete(self._message_timed_out(entry, operation, deadline, waiting))

        def withdraw(error: BaseException) -> None:
            if lane.withdraw(operation):
                operation.complete(error)

        handle._withdraw = withdraw
        handle._urge = lane.hurry

        def first_done() -> None:
            if first is not None and first.error is not None and lane.withdraw(operation):
                operation.complete(first.error)

        operation.on_done(finished)
        try:
            with naming_limits():
                if first is not None:
                    first.on_done(first_done)
                    lane.move_in_background(first, deadline, lambda: None)
                lane.move_in_background(operation, deadline, expire)
        except BaseException:  # Ctrl-C, or no more threads
            for one in operations if work is None else ():  # no caller will ever wait for them
                lane.withdraw(one)
            raise
        return handle

    def _failure(self, error: BaseException, entry: Entry) -> BaseException:
        """The error for an operation that failed. A rank that is lost breaks the group; one that left does not."""
        if isinstance(error, PeerLost) and not isinstance(error, ChannelClosed) and self._health.cause is None:
            self._health.fail(error)
            self._control.break_group(self._context, error)
        self._told = self._told or self._health.cause is not None
        return copy_for_raise(error, f"{entry.name} at {entry.site}", self._world_rank)

    def _message_timed_out(
        self, entry: Entry, operation: PendingTransfer, deadline: Deadline, waiting: list[int]
    ) -> Timeout:
        error = self._timed_out(entry.name, entry.site, deadline, waiting, None)
        if isinstance(operation, OutgoingFrame) and operation.begun:
            error.message += (
                "\n  a part of the message was on its way, so no more can be sent to that rank in this group"
            )
        return error

    def _dismiss(self, operation: PendingTransfer) -> None:
        """Called with an operation that is over, before its caller hears of it."""


def sending(verb: str, dst: int, tag: int) -> str:
    """A send as errors show it."""
    return f"{verb}(dst={dst}, tag={tag})" if tag else f"{verb}(dst={dst})"


def receiving(verb: str, src: int | None, tag: int) -> str:
    """A receive as errors show it."""
    source = "any" if src is None else str(src)
    return f"{verb}(src={source}, tag={tag})" if tag else f"{verb}(src={source})"


def exchanging(dst: int, src: int | None, tag: int) -> str:
    """A `sendrecv` as errors show it."""
    source = "any" if src is None else str(src)
    return f"sendrecv(dst={dst}, src={source}, tag={tag})" if tag else f"sendrecv(dst={dst}, src={source})"
