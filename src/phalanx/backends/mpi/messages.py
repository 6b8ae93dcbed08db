"""Messages through MPI: one object per world, which all lanes share. `protocol` says how they travel."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..._native import core, plain_arrays
from ...config import Options
from ...deadline import Deadline
from ...errors import ChannelClosed, PhalanxError, ProtocolError
from ...news import News
from ...transports.mailbox import Arrival, Envelope, Mailbox, PendingTransfer, Receive, Sink
from ...transports.ring_channel import last_handed_over
from ...transports.stream import Buffer
from ...wire.frames import FrameKind
from ..bounded_set import BoundedSet
from .forming import Communicators
from .handover import Handover
from .heads import MessageHeadReader
from .inbox import Inbox, Sending
from .library import LONGEST_NAP, Backoff, Mpi
from .progress_thread import ProgressThread
from .protocol import INLINE, Head, Word, pack_word, parse_message, parse_offer
from .sender import PIECE, MpiSender
from .transfers import Transfer, Transfers

if TYPE_CHECKING:
    from ..._core import ChannelLock, MpiRequest, PreparedMpiMessage, Recorder
    from ..._core import MpiMessages as FastMpiMessages

__all__ = ["MpiMessages"]

_FAST = ("MPI_Isend", "MPI_Irecv", "MPI_Test", "MPI_Cancel", "MPI_Iprobe", "MPI_Get_count", "MPI_Recv")
"""As in cpp/bindings/mpi_wire.hpp."""

ENDING = 1.0
"""Seconds that a transfer may still take after its time is over: MPI cannot be told to leave memory alone."""
LAST_WORDS = 0.25
"""Seconds in which the last messages of a rank that has left arrive: news of its leaving travels by another way."""


class MpiMessages:
    """Sends and receives for all lanes of a world.

    Args:
        comms: Communicators of the whole world, for this object alone. Something of an earlier world may still come.
        context: The world's.
        oversubscribed: True if the ranks of this host share its cores.
    """

    def __init__(
        self, mpi: Mpi, comms: Communicators, context: bytes, options: Options, *, oversubscribed: bool
    ) -> None:
        self.oversubscribed = oversubscribed
        self.version = mpi.version
        self._mpi = mpi
        self._heads, self._bodies = comms.heads, comms.bodies
        self._world = context[:8]
        self._options = options
        self._byte = mpi.module.BYTE
        self._transfers = Transfers(mpi)
        self._reader = MessageHeadReader(mpi, comms.heads, self._world)
        self._sender = MpiSender(mpi, comms, self._world, self._transfers)
        self._guard: threading.RLock | ChannelLock = threading.RLock() if core is None else core.ChannelLock()
        """Held by the thread that looks for what has come. Others need not wait for it."""
        self._news = News()
        self._listeners = 0
        """Threads that wait for the one that looks."""
        self._lock = threading.RLock()
        self._inboxes: dict[bytes, Inbox] = {}
        self._closed_lanes: BoundedSet[bytes] = BoundedSet()
        self._arriving: dict[tuple[int, int], tuple[Transfer, Arrival, Inbox]] = {}
        """Bodies on their way to this rank, by their sender and its number of the message."""
        self._farewells: list[tuple[float, Inbox, int, PhalanxError]] = []
        """Ranks that have gone from a lane: the earliest time to act on it, the lane, the rank, and the reason."""
        self._ended_inboxes: list[Inbox] = []
        """Of lanes that have ended with receives that were not posted yet."""
        self._thread = ProgressThread(self.progress, self._post_all_prepared)
        self._closed = False

    # -- for lanes -----------------------------------------------------------------------------------------------------

    def inbox(self, lane: bytes) -> Inbox:
        """The inbox of a lane, also of one that this rank has not opened yet."""
        with self._lock:
            inbox = self._inboxes.get(lane)
            if inbox is None:
                inbox = self._inboxes[lane] = Inbox()
            return inbox

    def send(
        self,
        lane: bytes,
        inbox: Inbox,
        dst: int,
        kind: FrameKind,
        tag: int,
        description: bytes,
        payload: Sequence[Buffer],
    ) -> Sending:
        """Begins to send a message to a world rank. The memory of `payload` must stay until it is done."""
        sending = self._sender.send(lane, inbox, dst, kind, tag, description, payload)
        if not sending.done:
            self._go_on(sending)
        return sending

    def withdraw_send(self, sending: Sending) -> bool:
        """Takes back a message whose time is over; False if it is done after all."""
        if self._sender.withdraw_offer(sending):
            self._forget(sending)
            return True
        if sending.parts and not self._finish_soon(sending):
            self._mpi.left_under_way.append(sending.parts)
            cut = ChannelClosed(sending.dst, "an earlier message to it was cut short")
            sending.inbox.gone.setdefault(sending.dst, cut)
        if sending.done:
            return False
        sending.withdrawn = True
        self._forget(sending)
        return True

    def withdraw_receive(self, receive: Receive, mailbox: Mailbox) -> bool:
        """Takes back a receive whose time is over; False if it is done after all."""
        arrival = receive.arrival
        if arrival is not None and arrival.owned is None and not arrival.complete:
            # MPI writes into the caller's memory. It will not take long: the sender was told to go ahead.
            if self._finish_soon(receive):
                return False
            with self._guard:
                self._cancel(arrival, ChannelClosed(arrival.envelope.src, "the rest of a message did not come"))
        return mailbox.withdraw(receive)

    def departed(self, inbox: Inbox, src: int, error: PhalanxError) -> None:
        """Ends a lane to a world rank that has left, a little later: its last messages are still to come."""
        with self._lock:
            self._farewells.append((time.monotonic() + LAST_WORDS, inbox, src, error))

    def close_lane(self, lane: bytes, inbox: Inbox, error: BaseException, *, goodbye: bool) -> None:
        """Ends a lane. With `goodbye`, the ranks that might still write to it are told."""
        with self._lock:
            if lane in self._closed_lanes:
                return
            self._closed_lanes.add(lane)
            inbox.ended, inbox.ended_at = error, time.monotonic()
            self._inboxes.pop(lane, None)
            if inbox.prepared:
                self._ended_inboxes.append(inbox)
                self._thread.hurry()
            self._farewells = [farewell for farewell in self._farewells if farewell[1] is not inbox]
            sending = list(inbox.sending)
            for one in sending:
                self._sender.take_offer(one.number)
        if not self._mpi.broken and self._mpi.in_charge:
            for one in sending:
                if one.number and not one.started:
                    self._sender.say(one.dst, Word.CUT, lane, one.number)
            if goodbye:
                for dst in inbox.talked - inbox.gone.keys():
                    self._sender.say(dst, Word.GOODBYE, lane)
            for transfer, _, arriving_at in list(self._arriving.values()):
                if arriving_at is inbox:
                    self._finish_in_background(transfer)
        for one in sending:
            if not one.done:
                one.complete(error)

    def wait(self, operations: Sequence[PendingTransfer], deadline: Deadline) -> bool:
        """Moves messages until all of these are done or one has failed; False if the deadline came first."""
        if _are_settled(operations):
            return True
        backoff = Backoff(oversubscribed=self.oversubscribed)
        while True:
            moved = self.progress()
            if _are_settled(operations):
                return True
            if moved:
                backoff.reset()
                continue
            if deadline.expired:
                return False
            if moved is None:
                with self._news:  # another thread moves messages, and notifies
                    self._listeners += 1
                    if not _are_settled(operations):
                        self._news.wait(LONGEST_NAP)
                    self._listeners -= 1
            else:
                backoff.pause()

    @contextlib.contextmanager
    def kept_moving(self) -> Iterator[None]:
        """Moves messages in the background meanwhile, because other ranks may still wait for those of this rank."""
        waiting = PendingTransfer()
        self.move_in_background(waiting, Deadline(math.inf), lambda: None)
        try:
            yield
        finally:
            waiting.complete()

    def move_in_background(self, operation: PendingTransfer, deadline: Deadline, expire: Callable[[], None]) -> None:
        """Moves messages in a thread until an operation is done. Calls `expire` if the deadline passes first."""
        self._thread.add(operation, deadline, expire)

    def close(self) -> None:
        """Ends the transfers of this process, as far as that is possible, and the thread."""
        self._thread.stop()
        if not self._mpi.broken:
            limit = Deadline(ENDING)
            while self._transfers and not limit.expired:
                self.progress()
        with self._guard:
            self._closed = True
            if self._mpi.broken:
                return
            for transfer, arrival, _ in list(self._arriving.values()):
                self._cancel(arrival, ChannelClosed(arrival.envelope.src, "this world was closed"))
                self._transfers.forget(transfer)
            self._mpi.left_under_way += self._transfers.unfinished()

    # -- the fast path -------------------------------------------------------------------------------------------------

    def fast_messages(
        self, lane: bytes, inbox: Inbox, rank: int, members: Sequence[int], recorder: Recorder, timeout: float
    ) -> FastMpiMessages | None:
        """The fast path of messages of a lane; None where there is no core, or only one thread may be in MPI."""
        addresses = [self._mpi.address_of(name) for name in _FAST]
        if core is None or not self._mpi.multiple or not all(addresses):
            return None
        handle, anyone = self._mpi.module._handleof, self._mpi.module.ANY_SOURCE
        comms = handle(self._heads), handle(self._bodies)
        wire = core.MpiWire(addresses, *comms, handle(self._byte), anyone, self._sender.highest_tag)
        made: FastMpiMessages = core.MpiMessages(
            wire,
            pack_word(Word.MESSAGE, self._world, lane),
            rank,
            members,
            inbox,
            self._reader,
            self._guard,
            plain_arrays(),
            recorder,
            timeout,
            INLINE,
            min(PIECE, self._options.max_message),
            self.oversubscribed,
            Handover(self, lane, inbox),
            self._sender.numbers,
            self._thread.unattended,
        )
        return made

    def post_prepared(self, inbox: Inbox) -> None:
        """Goes on with what the fast path of a lane has prepared. A thread that moves messages there gives way."""
        with self._guard:
            if inbox.posting:  # by this thread: it posts one of them
                return
            inbox.posting = True
            try:
                while inbox.prepared:
                    first = inbox.prepared[0]
                    first.post()
                    if inbox.prepared and inbox.prepared[0] is first:
                        inbox.prepared.popleft()
            finally:
                inbox.posting = False

    def take_back_prepared(self, prepared: PreparedMpiMessage, withdraw: Callable[[PendingTransfer], object]) -> None:
        """Ends a message that the fast path has prepared, and whose caller was interrupted."""
        with self._guard:
            operation = prepared.hand_over()
            last_handed_over()
        if operation is not None:
            withdraw(operation)

    def _take_prepared(self, lane: bytes) -> bool:
        """Goes on with what a fast path has prepared: something has come for it. False if there is nothing."""
        with self._lock:
            inbox = self._inboxes.get(lane)
        if inbox is None or not inbox.prepared:
            return False
        if inbox.posting:  # by this thread, which a callback has led here: those that it has come to are left out
            for one in tuple(inbox.prepared):
                one.post()
        else:
            self.post_prepared(inbox)
        return True

    def _post_all_prepared(self) -> None:
        with self._lock:
            inboxes = [*self._inboxes.values(), *self._ended_inboxes]
            self._ended_inboxes.clear()
        for inbox in inboxes:
            if inbox.prepared:
                self.post_prepared(inbox)

    def go_on_offering(self, sending: Sending) -> None:
        """Goes on with a message that was offered, and not answered yet."""
        self._sender.add_offer(sending)
        self._go_on(sending)

    def go_on_sending(self, sending: Sending, request: MpiRequest) -> Sending:
        """Goes on with a message that MPI has, and has not sent yet."""
        sending.started = True
        self._transfers.add([request], sending.parts, sending.complete)
        self._go_on(sending)
        return sending

    def go_on_receiving(
        self, inbox: Inbox, envelope: Envelope, sink: Sink, number: int, request: MpiRequest
    ) -> Receive:
        """Goes on with a message whose sender was told to send the body, which has not come yet."""
        lock = threading.RLock()
        with lock:
            receive, arrival = inbox.mailbox.adopt(envelope, lock, sink, 0)
        self._await_body(inbox, arrival, number, [request])
        with self._lock:
            ended = inbox.ended
        if ended is not None:
            # The receive fails, and its memory is the caller's again; but its sender waits until the body has come.
            while not request.Test() and time.monotonic() < inbox.ended_at + ENDING:
                os.sched_yield()
            self._cancel(arrival, ended)
        return receive

    def give_back(self, src: int, head: bytes) -> None:
        """Takes a head that the fast path has read, and cannot use."""
        self._reader.give_back(src, head)

    def keep(self, request: MpiRequest) -> None:
        """Keeps a head until MPI has sent it."""
        self._transfers.add([request], None, lambda: None)

    # -- moving --------------------------------------------------------------------------------------------------------

    def progress(self) -> bool | None:
        """Handles the messages that have come, and the transfers that are under way.

        Returns:
            True if anything has happened; None if another thread moves messages now.

        Raises:
            PhalanxError: MPI has failed.
        """
        if not self._guard.acquire(blocking=False):
            return None
        try:
            if self._closed:
                return False
            moved = self._take_heads()
            if self._transfers:
                moved |= self._transfers.test()
            if self._farewells:
                moved |= self._end_departed()
            if moved and self._listeners:
                with self._news:
                    self._news.notify_all()
            return moved
        except self._mpi.module.Exception as error:
            raise self._mpi.as_error(error, "receiving messages") from error
        finally:
            self._guard.release()

    def _take_heads(self) -> bool:
        if not self._reader.read() and not self._reader.unread:
            return False
        while self._reader.unread:  # a callback may call `progress` again, which then takes the next one
            self._handle(self._reader.unread.popleft())
        return True

    def _handle(self, head: Head) -> None:
        src, word = head.src, head.word
        if word == Word.MESSAGE:
            self._deliver(head)
        elif word == Word.OFFER:
            self._accept(head)
        elif word in (Word.READY, Word.DROP):
            if not self._sender.answered(head.number, Word(word)) and self._take_prepared(head.lane):
                self._sender.answered(head.number, Word(word))
        elif word == Word.CUT:
            if (src, head.number) not in self._arriving:
                self._take_prepared(head.lane)
            known = self._arriving.get((src, head.number))
            if known is not None:
                self._cancel(known[1], ChannelClosed(src, "it gave up in the middle of a message"), called_off=True)
        elif word == Word.GOODBYE:
            if head.lane not in self._closed_lanes:
                closed = ChannelClosed(src, "it has closed this group")
                with self._lock:
                    self._farewells.append((0.0, self.inbox(head.lane), src, closed))
        else:
            raise ProtocolError(f"rank {src} sent a malformed message: its kind is {word}", peer=src)

    def _deliver(self, head: Head) -> None:
        if head.lane in self._closed_lanes:
            self._sender.say(head.src, Word.GOODBYE, head.lane)
            return
        inbox = self.inbox(head.lane)
        inbox.talked.add(head.src)
        if inbox.prepared:
            self.post_prepared(inbox)
        envelope, payload = parse_message(head, self._options)
        inbox.mailbox.deliver(envelope, payload)

    def _accept(self, head: Head) -> None:
        src, lane, number = head.src, head.lane, head.number
        if lane in self._closed_lanes:
            self._sender.say(src, Word.DROP, lane, number)
            self._sender.say(src, Word.GOODBYE, lane)
            return
        envelope, sizes = parse_offer(head, self._options)
        inbox = self.inbox(lane)
        inbox.talked.add(src)
        if inbox.prepared:
            self.post_prepared(inbox)
        lock = threading.RLock()
        with lock:
            arrival = inbox.mailbox.begin(envelope, lock)
        if arrival.refused_by is not None:
            arrival.refused_by.announce()
        view = arrival.view
        if view is None:
            self._sender.say(src, Word.DROP, lane, number)
            return
        requests, start, tag = [], 0, number % self._sender.highest_tag
        for size in sizes:
            with self._mpi.lock:
                requests.append(self._bodies.Irecv([view[start : start + size], self._byte], src, tag))
            start += size
        transfer = self._await_body(inbox, arrival, number, requests)
        self._sender.say(src, Word.READY, lane, number)
        if arrival.owned is not None:
            self._finish_in_background(transfer)

    def _await_body(self, inbox: Inbox, arrival: Arrival, number: int, requests: list[Any]) -> Transfer:
        """Ends a message when its body has come, in these requests."""
        src = arrival.envelope.src
        inbox.under_way[src] += 1

        def arrived() -> None:
            del self._arriving[src, number]
            arrival.received = arrival.envelope.size
            inbox.mailbox.finish(arrival)
            inbox.under_way[src] -= 1

        transfer = self._transfers.add(requests, arrival.view, arrived)
        self._arriving[src, number] = (transfer, arrival, inbox)
        return transfer

    def _finish_in_background(self, transfer: Transfer) -> None:
        """Has the thread move a body that no receive waits for: its sender does, and this rank may call no MPI soon."""
        end = self._transfers.end_of(transfer)
        if end is not None:
            with contextlib.suppress(RuntimeError):  # the system has no thread left: the next call moves it
                self.move_in_background(end, Deadline(math.inf), lambda: None)

    def _cancel(self, arrival: Arrival, error: BaseException, *, called_off: bool = False) -> None:
        """Ends a message whose rest will not come.

        Args:
            called_off: Its sender has taken it back before any of it was on its way.
        """
        for key, (transfer, known, inbox) in list(self._arriving.items()):
            if known is not arrival:
                continue
            del self._arriving[key]
            self._transfers.forget(transfer)
            with self._mpi.lock:
                for request in transfer.requests:
                    request.Cancel()
                open_ones = [request for request in transfer.requests if not request.Test()]
            if open_ones:  # half of it is here already: MPI keeps the memory
                self._mpi.left_under_way.append((open_ones, transfer.memory))
            inbox.under_way[key[0]] -= 1
            if called_off and not open_ones:
                inbox.mailbox.call_off(arrival, error)
            else:
                inbox.mailbox.cut(arrival, error)

    def _end_departed(self) -> bool:
        """Ends the lanes of ranks that have gone, once everything that they sent has come."""
        now = time.monotonic()
        for _, inbox, _, _ in self._farewells[:]:
            if inbox.prepared:  # a payload may be on its way to one of them
                self.post_prepared(inbox)
        with self._lock:
            due = [one for one in self._farewells if one[0] <= now and not one[1].under_way[one[2]]]
            self._farewells = [one for one in self._farewells if one not in due]
        for _, inbox, rank, error in due:
            inbox.gone.setdefault(rank, error)
            inbox.mailbox.gone(rank, error)
            for sending in list(inbox.sending):
                if sending.dst == rank and not sending.started:
                    self._sender.take_offer(sending.number)
                    sending.complete(error)
        return bool(due)

    def _finish_soon(self, operation: PendingTransfer) -> bool:
        return self.wait([operation], Deadline(ENDING))

    def _go_on(self, sending: Sending) -> None:
        """Counts a message among those of its lane. If its lane or its receiver has gone meanwhile, it ends, too."""
        inbox = sending.inbox
        with self._lock:
            inbox.sending.add(sending)
            ended = inbox.ended or inbox.gone.get(sending.dst)
        sending.on_done(lambda: inbox.sending.discard(sending))
        if ended is not None and not sending.started and self._sender.withdraw_offer(sending):
            sending.complete(ended)

    def _forget(self, sending: Sending) -> None:
        with self._lock:
            sending.inbox.sending.discard(sending)


def _are_settled(operations: Sequence[PendingTransfer]) -> bool:
    """True if there is nothing to wait for any more: all are done, or one has failed."""
    waiting = False
    for operation in operations:
        if not operation.done:
            waiting = True
        elif operation.error is not None:
            return True
    return not waiting
