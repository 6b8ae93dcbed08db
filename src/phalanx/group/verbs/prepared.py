"""Messages that the core has prepared: the thread that waits for one moves it, as it would a synchronous one.

One that no thread waits for within a moment is left to the lane's background thread. So is one that lasts, and one that
another message of the group must not overtake.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from ..._native import core
from ...backends.lane import payload_size
from ...deadline import Deadline
from ...errors import ChannelClosed, PhalanxError
from ...frames import hide_frames
from ...interrupts import is_of_a_signal
from ...system_limits import naming_limits
from ...transports.channel import OutgoingFrame
from ...transports.mailbox import PendingTransfer, Receive
from ...transports.ring_channel import last_handed_over
from ...wire.frames import FrameKind, pack_header
from ..data.arrays import adapt, adapt_out, to_host
from ..tracking.journal import Entry
from ..work import NEVER_HELD_LONG, Work
from .lending import LentMessages
from .message_runner import AnySink, exchanging, receiving, sending

if TYPE_CHECKING:
    from ..._core import (
        FastMessages,
        MpiMessages,
        Posted,
        PreparedChannelMessage,
        PreparedMpiMessage,
        StreamMessages,
    )

    Prepared = PreparedChannelMessage | PreparedMpiMessage
else:
    Posted = type("Posted", (), {}) if core is None else core.Posted

__all__ = ["PreparedMessages", "PreparedReceiveWork", "PreparedSendWork", "SentWork"]


class SentWork(Work[None]):
    """A message that was sent at once. Nothing of it changes any more."""

    _operation = "send"
    _done = True
    _lock = NEVER_HELD_LONG
    __init__ = object.__init__


def go_on_without_it(work: UnpostedWork, error: BaseException) -> None:
    """An interrupt has ended the wait for a message, which goes on."""
    try:
        if work._group is not None:
            work._group._messages.post_prepared()
    finally:
        hide_frames(error)


class UnpostedWork(Posted, Work[Any]):
    """A message on the fast path, which the lane does not know yet. The core makes it, with the fields of `Posted`."""

    _lock = NEVER_HELD_LONG
    """Until the lane knows it: no thread sleeps on it before, and no callback waits for it."""
    _posting = False
    # As far as it is posted: after an interrupt, it goes on from there.
    _sink: AnySink | None = None
    _account: tuple[Deadline, Entry] | None = None
    _transfer: Any = None
    __init__ = object.__init__

    if core is not None and not TYPE_CHECKING:
        wait = core.PostedWait(Work.wait, go_on_without_it)  # moves it, and calls `Work.wait` if that takes long

    def add_done_callback(self, callback: Callable[[Work[Any]], object]) -> None:
        self._help(None)
        super().add_done_callback(callback)

    def done(self) -> bool:
        self._look()
        return super().done()

    def result(self) -> Any:
        self._look()
        return super().result()

    def exception(self) -> BaseException | None:
        self._look()
        return super().exception()

    def __repr__(self) -> str:
        self._look()
        return super().__repr__()

    def _look(self) -> None:
        """Notes the end if another thread has moved the message, or one that moved another along with it."""
        prepared = self._prepared
        if prepared is not None and prepared.ended:
            self._end()

    def post(self) -> None:
        """Has the lane go on with it, unless it has ended. Called by the lane, with its lock held."""
        group, prepared = self._group, self._prepared
        if group is None or prepared is None or self._posting:
            return
        ended = prepared.stop()
        try:
            self._posting = True
            if ended:  # in another thread, which is about to note it, or by one that waited for another message
                prepared.run()
                self._done = True
            elif not self._done:  # else an interrupt has come after it was posted
                if self._lock is NEVER_HELD_LONG:
                    self._lock = threading.Lock()
                self._post(group, prepared)
        except BaseException as error:
            if is_of_a_signal(error):  # it is posted again, from where this has come to
                raise
            self._finish(error=error)
        finally:
            self._posting = False
        prepared.leave()
        self._group = self._prepared = self._sink = self._account = self._transfer = None

    def _post(self, group: PreparedMessages, prepared: Any) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        """It has ended well."""
        self._done = True
        self._group = self._prepared = None
        line = self._line
        if line and line[0] is self:
            line.popleft()
        else:  # posting it again does nothing
            with contextlib.suppress(ValueError):
                line.remove(self)

    def _on_told(self) -> None:
        """A message that failed breaks no group."""

    def _help(self, timeout: float | None) -> None:
        group = self._group
        if group is not None:
            if group._backend.forked:
                group._backend.check_usable()  # raises: the message is the parent's
            group._messages.post_prepared()


class PreparedReceiveWork(UnpostedWork):
    """A receive that is not posted yet. Its result is the array that is filled."""

    _operation = "recv"

    def _post(self, group: PreparedMessages, prepared: Prepared) -> None:
        group._post_receive(self, prepared)


class PreparedSendWork(UnpostedWork):
    """A long array whose receiver has not come for it yet."""

    _operation = "send"

    def _post(self, group: PreparedMessages, prepared: Prepared) -> None:
        group._post_send(self, prepared)


class PreparedMessages(LentMessages):
    """Prepares messages, and goes on with those that the core cannot finish."""

    _sent = staticmethod(SentWork)
    """The work of a message that the core has sent at once."""

    _receive_work = PreparedReceiveWork
    """The work of a receive that the core has prepared."""
    _send_work = PreparedSendWork
    """The work of a send that the core has prepared, and now begins."""

    def _take_back_prepared(self, work: UnpostedWork, prepared: Prepared) -> None:
        line = self._messages.prepared
        if line is not None and work in line:
            line.remove(work)
            self._messages.take_back_prepared(prepared)
        elif (withdraw := work._withdraw) is not None:  # another thread has posted it
            withdraw(ChannelClosed(self._world_rank, "its caller was interrupted"))

    def _exchange_by_channels(
        self, x: Any, dst: int, out: Any, src: int | None, tag: int, timeout: float | None
    ) -> tuple[PendingTransfer | bool, PendingTransfer | bool]:
        """Sends an array and takes the one that comes for it, at the same time, through two rings or connections.

        Returns:
            Whether it is sent, and whether the other has come; or what goes on with them.
        """
        fast = cast("FastMessages | StreamMessages", self._fast_messages)
        answer = fast.exchange(x, dst, out, src, tag, timeout)
        return (answer, answer) if isinstance(answer, bool) else answer

    def _exchange_prepared(
        self, x: Any, dst: int, out: Any, src: int | None, tag: int, timeout: float | None
    ) -> tuple[PendingTransfer | bool, PendingTransfer | bool]:
        """Sends an array by the fast path, and takes the one that comes for it.

        Returns:
            Whether it is sent, and whether the other has come; or what goes on with them.
        """
        fast = cast("MpiMessages | None", self._fast_messages)
        incoming = None if fast is None else fast.prepare_receive(out, src, tag, timeout)
        if fast is None or incoming is None:
            return False, False
        outgoing = None
        try:
            outgoing = fast.prepare_send(x, dst, tag, timeout)
            if outgoing is None or outgoing.overlaps(incoming):
                return False, False
            if outgoing.exchange(incoming):
                return True, True
            last_handed_over()
            return outgoing.ended or outgoing.operation or False, incoming.ended or incoming.operation or False
        except BaseException:
            last_handed_over()
            for operation in (None if outgoing is None else outgoing.operation, incoming.operation):
                if operation is not None:
                    self._messages.withdraw(operation)
            raise
        finally:
            incoming.leave()
            if outgoing is not None:
                outgoing.leave()

    def _finish_exchange(
        self,
        x: Any,
        started: PendingTransfer | bool,
        received: PendingTransfer | bool,
        dst: int,
        src: int | None,
        tag: int,
        began: float,
        timeout: float | None,
    ) -> None:
        """Waits for what the fast path has left of an exchange in which the other message has come, or begun to."""
        deadline = self._deadline(timeout)
        deadline.at = began + deadline.seconds
        if started is False:
            started = self._start_array(x, dst, tag, deadline)
        under_way = [part for part in (started, received) if not isinstance(part, bool)]
        entry = self._journal.begin(exchanging(dst, src, tag), src)
        self._complete(entry, under_way, deadline, self._sources(src))

    def _post_receive(self, work: UnpostedWork, prepared: Prepared) -> None:
        src, tag = prepared.peer, prepared.tag
        sink = work._sink = work._sink or self._sink_for(adapt_out(work._result))
        work._account = work._account or self._account_of(prepared, receiving("recv", src, tag))
        deadline, entry = work._account
        try:
            receive = work._transfer
            if receive is None:
                receive = work._transfer = prepared.hand_over(sink) or self._messages.post(src, tag, sink)
                last_handed_over()
            self._in_background(
                entry, receive, deadline, [src], lambda: self._received(entry, receive, sink, src), work=work
            )
        except BaseException as error:
            if not is_of_a_signal(error):
                self._forget(sink)
                entry.end(failed=True)
            elif work._transfer is None:
                work._transfer = self._posted_for(sink)
            raise

    def _posted_for(self, sink: AnySink) -> Receive | None:
        """The receive of a call that was interrupted, if its message has come. Otherwise it is taken back."""
        receive: Receive | None = None if sink.receive is None else sink.receive()
        if receive is None or self._messages.withdraw(receive) or not receive.done:
            return None
        return receive

    def _post_send(self, work: UnpostedWork, prepared: Prepared) -> None:
        dst = prepared.peer
        work._account = work._account or self._account_of(prepared, sending("send", dst, prepared.tag))
        deadline, entry = work._account
        try:
            prepared.begin()
            if work._transfer is None:
                work._transfer = prepared.hand_over()
                last_handed_over()
            if work._transfer is None:
                work._transfer = self._frame_of(cast("PreparedChannelMessage", prepared), deadline)
            operation = work._transfer
            if isinstance(operation, OutgoingFrame):
                operation.channel.go_on_with(operation)
            self._in_background(entry, operation, deadline, [dst], lambda: None, work=work)
        except BaseException as error:
            if not is_of_a_signal(error):
                entry.end(failed=True)
            raise

    def _frame_of(self, prepared: PreparedChannelMessage, deadline: Deadline) -> PendingTransfer:
        """The frame of an array of the host, which is not queued yet."""
        host = to_host(adapt(prepared.array, write=False), write=False)
        description = host.description.pack()
        try:
            with naming_limits():
                channel = self._messages.outbound(prepared.peer, deadline)
        except PhalanxError as error:
            failed = PendingTransfer()
            failed.complete(error)
            return failed
        header = pack_header(FrameKind.ARRAY, prepared.tag, len(description), payload_size([host.bytes]))
        return OutgoingFrame([header, description, host.bytes], channel)

    def _start_array(self, x: Any, dst: int, tag: int, deadline: Deadline) -> PendingTransfer:
        """Has the lane begin to send an array of the host."""
        host = to_host(adapt(x, write=False), write=False)
        with naming_limits():
            return self._messages.start_send(dst, FrameKind.ARRAY, tag, host.description.pack(), [host.bytes], deadline)

    def _account_of(self, prepared: Prepared, what: str) -> tuple[Deadline, Entry]:
        """The deadline of a prepared message, and its entry in the journal, both since it was called."""
        deadline = Deadline(prepared.seconds)
        deadline.at = prepared.began + prepared.seconds
        entry = self._journal.begin(what, prepared.peer, prepared.bytes, posted=True)
        entry.caller, entry.began = prepared.site, prepared.began
        return deadline, entry
