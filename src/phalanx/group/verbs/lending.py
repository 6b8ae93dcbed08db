"""Messages of arrays on a GPU that the receiver shares: the sender lends them, and the receiver copies them."""

from __future__ import annotations

import contextlib
import functools
import time
from typing import TYPE_CHECKING, Any

import msgspec

from ...deadline import Deadline
from ...errors import ChannelClosed, PhalanxError, ProtocolError, UsageError
from ...system_limits import naming_limits
from ...transports.mailbox import BufferSink, Envelope, PendingTransfer, Receive
from ...wire.frames import MAX_TAG, FrameKind
from ..data.arrays import Adapted, to_host
from ..tracking.journal import Entry
from ..work import Work
from .message_runner import AnySink, MessageRunner, sending
from .sinks import ArraySink, Lent, NewArraySink

if TYPE_CHECKING:
    from ...cuda.lending import Loan

__all__ = ["LENT_FROM", "LentMessages"]

LENT_FROM = 512 << 10
"""Bytes above which an array on a GPU is lent to a receiver that shares the GPU, and does not go through the host. Two
ranks of an H200 exchange arrays in 600 to 700 µs so, whatever their length; through the host they need 150 to 180 for
64 KiB and 1,130 for 1 MiB."""
AGREED_WAIT = 0.001
"""Seconds between two looks whether this rank, too, has agreed on how the group shares a GPU."""
CAUSE_WAIT = 2.0
"""Seconds to wait for the reason why the memory of another rank is gone, or why it gave up: it may have to ask around
first."""


class LentMessages(MessageRunner):
    """Lends long arrays, and takes those that others lend."""

    def _lend(self, adapted: Adapted, dst: int, deadline: Deadline) -> Loan | None:
        """Offers an array to the rank that it is sent to; None if it has to go through the host."""
        loans = self._loans
        if adapted.empty is None or loans is None or dst == self.rank or adapted.array.nbytes <= LENT_FROM:
            return None
        return loans.offer(adapted.array) if adapted.array.ready.wait(deadline) else None

    def _start_lending(
        self, adapted: Adapted, loan: Loan, dst: int, tag: int, deadline: Deadline
    ) -> tuple[PendingTransfer, Receive]:
        """Sends the offer. Returns that, and the receive of the answer."""
        number = loan.offer.word
        description = Lent(adapted.description.pack(), number, msgspec.msgpack.encode(loan.offer)).pack()
        taken = self._messages.post(dst, MAX_TAG + 1 + number, BufferSink(memoryview(bytearray())))
        try:
            with naming_limits():
                outgoing = self._messages.start_send(dst, FrameKind.LENT, tag, description, [], deadline)
        except BaseException:
            self._messages.withdraw(taken)
            raise
        return outgoing, taken

    def _send_lent(
        self, adapted: Adapted, loan: Loan, dst: int, tag: int, deadline: Deadline, async_op: bool
    ) -> Work[None] | None:
        entry = self._journal.begin(sending("send", dst, tag), dst, adapted.array.nbytes, posted=async_op)
        try:
            outgoing, taken = self._start_lending(adapted, loan, dst, tag, deadline)
            if async_op:
                revoke = functools.partial(self._revoke, loan)
                return self._in_background(entry, taken, deadline, [dst], loan.end, revoke, first=outgoing)
            self._complete(entry, [outgoing, taken], deadline, [dst])
        except BaseException:
            self._revoke(loan)
            entry.end(failed=True)
            raise
        loan.end()
        return None

    def _exchange_lent(
        self,
        entry: Entry,
        adapted: Adapted,
        loan: Loan,
        dst: int,
        tag: int,
        receive: Receive,
        sink: AnySink,
        src: int | None,
        deadline: Deadline,
    ) -> Any:
        """`sendrecv` of an array that is lent: what comes is taken before the answer is waited for, as others do."""
        lane, taken = self._messages, None
        try:
            outgoing, taken = self._start_lending(adapted, loan, dst, tag, deadline)
            self._complete(entry, [outgoing, receive], deadline, self._sources(src), ends=False)
            result = self._received(entry, receive, sink, src)
            self._complete(entry, [taken], deadline, [dst])
        except BaseException as error:
            # What came does not fit, which is no reason to cut short what is sent.
            if taken is not None and isinstance(error, UsageError):
                lane.wait([taken], deadline)
            if taken is None or lane.withdraw(taken) or taken.error is not None:
                self._revoke(loan)
            raise
        loan.end()
        return result

    def _revoke(self, loan: Loan) -> None:
        loan.revoke(broken=self._health.cause is not None)

    def _borrow(self, envelope: Envelope, lent: Lent, target: Any) -> None:
        """Takes an array that was lent. The sender hears of it, however it ends.

        Raises:
            ChannelClosed: The sender has given it up.
            PeerLost: It has ended, and its memory with it.
            PhalanxError: It has given up because the group has broken: the group's reason.
            CudaError: Its memory cannot be opened.
        """
        from ...cuda.driver import CudaError  # most programs have no GPU
        from ...cuda.lending import Revoked, decode_offer

        try:
            loans = self._loans
            while loans is None:  # the sender's collective, in which all agreed, has ended before this rank's
                self._check()
                time.sleep(AGREED_WAIT)
                loans = self._loans
            loans.take(decode_offer(lent.offer), target, target.nbytes)
        except Revoked as revoked:
            cause = self._messages.await_error(CAUSE_WAIT if revoked.broken else 0.0)
            words = "it gave up sending this array before it was taken"
            raise cause or ChannelClosed(self._naming(envelope), words) from None
        except CudaError as error:  # it may have ended, and its memory with it
            raise self._messages.await_error(CAUSE_WAIT) or error from None
        finally:
            self._say_taken(envelope, lent)

    def _say_taken(self, envelope: Envelope, lent: Lent) -> None:
        lane = self._messages
        with contextlib.suppress(PhalanxError):  # the sender is gone, and waits for no answer
            src = lane.source_of(envelope)
            lane.answer(src, FrameKind.TAKEN, MAX_TAG + 1 + lent.number, Deadline(self._timeout))

    def _dismiss(self, operation: PendingTransfer) -> None:
        """Answers the sender of an array that was lent to a receive that does not take it."""
        envelope = operation.envelope if isinstance(operation, Receive) and operation.error is not None else None
        if envelope is not None and envelope.kind is FrameKind.LENT:
            with contextlib.suppress(ProtocolError):
                self._say_taken(envelope, Lent.parse(envelope.description))

    def _new_sink(self) -> NewArraySink:
        return NewArraySink(self._naming, self._borrow, self._backend.options.max_message)

    def _sink_for(self, target: Adapted) -> ArraySink:
        """The sink of an array that is filled. A short one on a GPU has memory of the host from the beginning."""
        if target.array.nbytes <= LENT_FROM:
            target = to_host(target, write=True, read=False)
        return ArraySink(target, self._naming, self._borrow)
