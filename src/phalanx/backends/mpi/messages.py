"""Messages through MPI: one post office per world, which all lanes share.

A message is announced by a head on a communicator of its own, found by matched probe from anyone: the head names the
lane and carries tag, kind and description, so tags have 63 bits and a sub-group needs nobody's consent. A short payload
travels inside the head. A longer one stays where it is until the receiver has a place for it and says so; then it goes
from the sender's memory straight into the receiver's. What was not asked for yet can still be taken back.

```
sender                                      receiver
MESSAGE lane, header, description, payload  ->            all of it, if it is short
OFFER   lane, header, description, sizes    ->
                                            <-  READY     its receives are posted
body, one send for each part                ->
                                            <-  DROP      instead of READY: nobody wants it
CUT                                         ->            instead of the body: the sender gave up
GOODBYE lane                                ->            the sender has closed the lane
```
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import math
import secrets
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ...config import Options
from ...deadline import Deadline
from ...errors import ChannelClosed, PhalanxError, ProtocolError
from ...transports.mailbox import Arrival, Envelope, Mailbox, PendingTransfer, Receive
from ...transports.stream import Buffer
from ...wire.frames import HEADER_SIZE, FrameKind, pack_header, parse_header
from ..recent import Recent
from .forming import Communicators
from .library import LONGEST_NAP, Mpi, Patience

__all__ = ["Inbox", "Post", "Sending"]

INLINE = 2048
"""Bytes of a payload that travel inside the head: short enough for every MPI to send them without asking first."""
PIECE = 1 << 30
"""Bytes that are given to MPI as one message."""
BATCH = 64
"""Heads that are taken at once, before anything else is looked at."""
ENDING = 1.0
"""Seconds that a transfer may still take after its time is over: MPI cannot be told to leave memory alone."""
LAST_WORDS = 0.25
"""Seconds in which what a rank sent before it left will be here: it left by another way."""
STOP_WAIT = 5.0

_WORD = struct.Struct("<B8s16sQ")
"""What it is, the world, the lane, and the message's number of the sender's, which is also the tag of its body."""


class _Word(enum.IntEnum):
    MESSAGE = 1
    OFFER = 2
    READY = 3
    DROP = 4
    CUT = 5
    GOODBYE = 6


class Inbox:
    """What came for one lane, and who has closed it. It may be older than the lane itself."""

    def __init__(self) -> None:
        self.mailbox = Mailbox()
        self.gone: dict[int, PhalanxError] = {}
        """World ranks to which nothing can be sent any more."""
        self.talked: set[int] = set()
        """World ranks that must hear when this rank closes the lane."""
        self.under_way: defaultdict[int, int] = defaultdict(int)
        """Messages of each world rank whose payload is on its way."""
        self.sending: set[Sending] = set()


class Sending(PendingTransfer):
    """A message that this rank sends."""

    __slots__ = ("dst", "inbox", "lane", "number", "parts", "started")

    def __init__(self, lane: bytes, inbox: Inbox, dst: int, parts: list[Buffer]) -> None:
        super().__init__()
        self.lane = lane
        self.inbox = inbox
        self.dst = dst
        """A world rank."""
        self.parts = parts
        self.number = 0
        self.started = False
        """Whether MPI has its memory."""


class _Transfer:
    """Requests that are under way in MPI, the memory they need, and what to do at their end."""

    __slots__ = ("memory", "on_done", "requests")

    def __init__(self, requests: list[Any], memory: object, on_done: Callable[[], None]) -> None:
        self.requests = requests
        self.memory = memory
        self.on_done = on_done


class Post:
    """Sends and receives for all lanes of a world.

    Args:
        comms: Of the whole world, for this post alone. Something of an earlier world may still come on them.
        context: The world's.
        crowded: Whether ranks have to share cores.
    """

    def __init__(self, mpi: Mpi, comms: Communicators, context: bytes, options: Options, *, crowded: bool) -> None:
        self.crowded = crowded
        self._mpi = mpi
        self._heads, self._bodies = comms.heads, comms.bodies
        self._world = context[:8]
        self._options = options
        self._byte = mpi.module.BYTE
        self._status = mpi.module.Status()
        self._probe = comms.heads.Improbe
        self._anyone = (mpi.module.ANY_SOURCE, mpi.module.ANY_TAG)
        self._highest_tag: int = comms.bodies.Get_attr(mpi.module.TAG_UB) or 32767
        # Of their own in every world: the body of a message of an earlier one must not be taken for one of this.
        self._numbers = itertools.count(secrets.randbits(62))
        self._guard = threading.RLock()
        """Held by the thread that looks for what has come. Others need not wait for it."""
        self._news = threading.Condition()
        self._listeners = 0
        """Threads that wait for the one that looks."""
        self._lock = threading.RLock()
        self._inboxes: dict[bytes, Inbox] = {}
        self._closed: Recent[bytes] = Recent()
        self._offers: dict[int, Sending] = {}
        self._transfers: list[_Transfer] = []
        self._arriving: dict[tuple[int, int], tuple[_Transfer, Arrival, Inbox]] = {}
        self._behind: defaultdict[int, deque[tuple[Any, bytearray]]] = defaultdict(deque)
        """Heads of each rank that are still on their way; what it sent later comes after them."""
        self._unread: deque[tuple[int, memoryview, int, bytes, int]] = deque()
        """Heads that have come, in order."""
        self._farewells: list[tuple[float, Inbox, int, PhalanxError]] = []
        """Ranks that have gone from a lane: not before, which lane, who, and how."""
        self._mover: _Mover | None = None
        self._closed_for_good = False

    # -- for lanes -----------------------------------------------------------------------------------------------------

    def inbox(self, lane: bytes) -> Inbox:
        """That of a lane, also of one that this rank has not opened yet."""
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
        # In pieces: some ways of MPI cannot move more than 2 GiB at once, and do not say so.
        parts: list[Buffer] = [part[at : at + PIECE] for part in payload for at in range(0, len(part), PIECE)]
        size = sum(map(len, parts))
        sending = Sending(lane, inbox, dst, parts)
        header = pack_header(kind, tag, len(description), size)
        inbox.talked.add(dst)
        if size <= INLINE:
            sending.parts, sending.started = [], True
            word = _WORD.pack(_Word.MESSAGE, self._world, lane, 0)
            self._post_head(dst, b"".join([word, header, description, *parts]), sending)
        else:
            sending.number = next(self._numbers)
            word = _WORD.pack(_Word.OFFER, self._world, lane, sending.number)
            sizes = struct.pack(f"<H{len(parts)}Q", len(parts), *map(len, parts))
            with self._lock:
                self._offers[sending.number] = sending
            self._post_head(dst, b"".join([word, header, sizes, description]))
        if not sending.done:
            with self._lock:
                inbox.sending.add(sending)
            sending.on_done(lambda: inbox.sending.discard(sending))
        return sending

    def withdraw_send(self, sending: Sending) -> bool:
        """Takes back a message whose time is over; False if it is done after all."""
        with self._lock:
            waiting = self._offers.pop(sending.number, None) is not None
            if waiting:
                sending.withdrawn = True
        if waiting:
            self._say(sending.dst, _Word.CUT, sending.lane, sending.number)
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
        """A world rank has left, as others tell. What it sent before is still to come."""
        with self._lock:
            self._farewells.append((time.monotonic() + LAST_WORDS, inbox, src, error))

    def close_lane(self, lane: bytes, inbox: Inbox, error: BaseException, *, goodbye: bool) -> None:
        """Ends a lane; says so to those who might still write."""
        with self._lock:
            if lane in self._closed:
                return
            self._closed.add(lane)
            self._inboxes.pop(lane, None)
            self._farewells = [farewell for farewell in self._farewells if farewell[1] is not inbox]
            sending = list(inbox.sending)
            for one in sending:
                self._offers.pop(one.number, None)
        if not self._mpi.broken and self._mpi.in_charge:
            for one in sending:
                if one.number and not one.started:
                    self._say(one.dst, _Word.CUT, lane, one.number)
            if goodbye:
                for dst in inbox.talked - inbox.gone.keys():
                    self._say(dst, _Word.GOODBYE, lane)
        for one in sending:
            if not one.done:
                one.complete(error)

    def wait(self, operations: Sequence[PendingTransfer], deadline: Deadline) -> bool:
        """Moves messages until all of these are done or one has failed; False if the deadline came first."""
        if _are_settled(operations):
            return True
        patience = Patience(crowded=self.crowded)
        while True:
            moved = self.progress()
            if _are_settled(operations):
                return True
            if moved:
                patience.renew()
                continue
            if deadline.expired:
                return False
            if moved is None:
                with self._news:  # another thread is at it, and tells
                    self._listeners += 1
                    if not _are_settled(operations):
                        self._news.wait(LONGEST_NAP)
                    self._listeners -= 1
            else:
                patience.pause()

    @contextlib.contextmanager
    def kept_moving(self) -> Iterator[None]:
        """Moves messages in the background meanwhile: others may need this rank to hear what it has said."""
        waiting = PendingTransfer()
        self.move_in_background(waiting, Deadline(math.inf), lambda: None)
        try:
            yield
        finally:
            waiting.complete()

    def move_in_background(self, operation: PendingTransfer, deadline: Deadline, expire: Callable[[], None]) -> None:
        """Moves messages until an operation is done for which nobody waits; calls `expire` if that takes too long."""
        with self._lock:
            if self._mover is None:
                self._mover = _Mover(self)
        self._mover.add(operation, deadline, expire)

    def close(self) -> None:
        """Ends what this process still has under way, as far as that is possible, and its thread."""
        if self._mover is not None:
            self._mover.stop()
        if not self._mpi.broken:
            limit = Deadline(ENDING)
            while self._transfers and not limit.expired:
                self.progress()
        with self._guard:
            self._closed_for_good = True
            if self._mpi.broken:
                return
            for transfer, arrival, _ in list(self._arriving.values()):
                self._cancel(arrival, ChannelClosed(arrival.envelope.src, "this world was closed"))
                self._end(transfer)
            self._mpi.left_under_way += self._transfers

    # -- moving --------------------------------------------------------------------------------------------------------

    def progress(self) -> bool | None:
        """Takes what has come and looks after what is under way.

        Returns:
            Whether anything has happened; None if another thread is at it.

        Raises:
            PhalanxError: MPI has failed.
        """
        if not self._guard.acquire(blocking=False):
            return None
        try:
            if self._closed_for_good:
                return False
            moved = self._take_heads()
            if self._transfers:
                moved |= self._test_transfers()
            if self._farewells:
                moved |= self._say_farewell()
            if moved and self._listeners:
                with self._news:
                    self._news.notify_all()
            return moved
        except self._mpi.module.Exception as error:
            raise self._mpi.as_error(error, "receiving messages") from error
        finally:
            self._guard.release()

    def _take_heads(self) -> bool:
        status = self._status
        found: list[tuple[int, bytearray]] = []
        for _ in range(BATCH):
            with self._mpi.lock:
                message = self._probe(*self._anyone, status)
                if message is None:
                    break
                src: int = status.Get_source()
                size: int = status.Get_count(self._byte)
                head = bytearray(size)
                if size <= 2 * INLINE and not self._behind.get(src):
                    message.Recv([head, self._byte])
                    found.append((src, head))
                else:
                    self._behind[src].append((message.Irecv([head, self._byte]), head))
        for src, waiting in self._behind.items() if self._behind else ():
            while waiting:
                with self._mpi.lock:
                    if not waiting[0][0].Test():
                        break
                found.append((src, waiting.popleft()[1]))
        if not found:
            return False
        words = []
        for src, head in found:
            word, world, lane, number = _WORD.unpack_from(head)
            if world == self._world:
                words.append((src, memoryview(head), word, lane, number))
        # Who offered and gave up before this rank looked has sent nothing.
        cut = {(src, number) for src, _, word, _, number in words if word == _Word.CUT}
        self._unread.extend(one for one in words if one[2] != _Word.OFFER or (one[0], one[4]) not in cut)
        while self._unread:  # what is done with one may lead back here, and must find the next one
            self._handle(*self._unread.popleft())
        return True

    def _handle(self, src: int, head: memoryview, word: int, lane: bytes, number: int) -> None:
        if word == _Word.MESSAGE:
            self._deliver(src, head, lane)
        elif word == _Word.OFFER:
            self._accept(src, head, lane, number)
        elif word in (_Word.READY, _Word.DROP):
            with self._lock:
                sending = self._offers.pop(number, None)
            if sending is not None and word == _Word.READY:
                self._send_body(sending)
            elif sending is not None:
                sending.complete()
        elif word == _Word.CUT:
            known = self._arriving.get((src, number))
            if known is not None:
                self._cancel(known[1], ChannelClosed(src, "it gave up in the middle of a message"))
        elif word == _Word.GOODBYE:
            if lane not in self._closed:
                closed = ChannelClosed(src, "it has closed this group")
                with self._lock:
                    self._farewells.append((0.0, self.inbox(lane), src, closed))
        else:
            raise ProtocolError(f"rank {src} sent what is no message: {word}", peer=src)

    def _envelope(self, src: int, head: memoryview, skip: int) -> tuple[Envelope, int]:
        """What a head announces, and where its description ends; `skip` bytes come between the two."""
        limits = self._options
        start = _WORD.size + HEADER_SIZE
        header = parse_header(head[_WORD.size : start], max_message=limits.max_message, max_object=limits.max_object)
        start += skip
        end = start + header.description
        return Envelope(src, header.kind, header.tag, bytes(head[start:end]), header.payload), end

    def _deliver(self, src: int, head: memoryview, lane: bytes) -> None:
        if lane in self._closed:
            self._say(src, _Word.GOODBYE, lane)
            return
        inbox = self.inbox(lane)
        inbox.talked.add(src)
        envelope, end = self._envelope(src, head, 0)
        inbox.mailbox.deliver(envelope, head[end:])

    def _accept(self, src: int, head: memoryview, lane: bytes, number: int) -> None:
        if lane in self._closed:
            self._say(src, _Word.DROP, lane, number)
            self._say(src, _Word.GOODBYE, lane)
            return
        at = _WORD.size + HEADER_SIZE
        (count,) = struct.unpack_from("<H", head, at)
        sizes = struct.unpack_from(f"<{count}Q", head, at + 2)
        envelope, _ = self._envelope(src, head, 2 + 8 * count)
        if sum(sizes) != envelope.size:
            raise ProtocolError(f"rank {src} offers {envelope.size} bytes in parts of {sum(sizes)}", peer=src)
        inbox = self.inbox(lane)
        inbox.talked.add(src)
        lock = threading.RLock()
        with lock:
            arrival = inbox.mailbox.begin(envelope, lock)
        if arrival.refused_by is not None:
            arrival.refused_by.announce()
        view = arrival.view
        if view is None:
            self._say(src, _Word.DROP, lane, number)
            return
        requests, start, tag = [], 0, number % self._highest_tag
        for size in sizes:
            with self._mpi.lock:
                requests.append(self._bodies.Irecv([view[start : start + size], self._byte], src, tag))
            start += size
        inbox.under_way[src] += 1

        def arrived() -> None:
            del self._arriving[src, number]
            arrival.received = envelope.size
            inbox.mailbox.finish(arrival)
            inbox.under_way[src] -= 1

        transfer = _Transfer(requests, view, arrived)
        self._arriving[src, number] = (transfer, arrival, inbox)
        with self._lock:
            self._transfers.append(transfer)
        self._say(src, _Word.READY, lane, number)

    def _send_body(self, sending: Sending) -> None:
        tag, requests = sending.number % self._highest_tag, []
        for part in sending.parts:
            with self._mpi.lock:
                requests.append(self._bodies.Isend([part, self._byte], sending.dst, tag))
        sending.started = True
        with self._lock:
            self._transfers.append(_Transfer(requests, sending.parts, sending.complete))

    def _test_transfers(self) -> bool:
        moved = False
        with self._lock:
            transfers = list(self._transfers)
        for transfer in transfers:
            requests = transfer.requests
            with self._mpi.lock:
                while requests and requests[0].Test():
                    requests.pop(0)
            if not requests and self._end(transfer):
                moved = True
                transfer.on_done()
        return moved

    def _end(self, transfer: _Transfer) -> bool:
        """Forgets a transfer; False if that was done already."""
        with self._lock:
            if transfer not in self._transfers:
                return False
            self._transfers.remove(transfer)
            return True

    def _cancel(self, arrival: Arrival, error: PhalanxError) -> None:
        """The rest of a message will not come."""
        for key, (transfer, known, inbox) in list(self._arriving.items()):
            if known is not arrival:
                continue
            del self._arriving[key]
            self._end(transfer)
            with self._mpi.lock:
                for request in transfer.requests:
                    request.Cancel()
                open_ones = [request for request in transfer.requests if not request.Test()]
            if open_ones:  # half of it is here already: MPI keeps the memory
                self._mpi.left_under_way.append((open_ones, transfer.memory))
            inbox.under_way[key[0]] -= 1
            inbox.mailbox.cut(arrival, error)

    def _say_farewell(self) -> bool:
        """Ends the lanes of ranks that have gone, once everything that they sent has come."""
        now = time.monotonic()
        with self._lock:
            due = [one for one in self._farewells if one[0] <= now and not one[1].under_way[one[2]]]
            self._farewells = [one for one in self._farewells if one not in due]
        for _, inbox, rank, error in due:
            inbox.gone.setdefault(rank, error)
            inbox.mailbox.gone(rank, error)
            for sending in list(inbox.sending):
                if sending.dst == rank and not sending.started:
                    with self._lock:
                        self._offers.pop(sending.number, None)
                    sending.complete(error)
        return bool(due)

    def _post_head(self, dst: int, head: bytes, sending: Sending | None = None) -> None:
        with self._mpi.lock:
            request = self._heads.Isend([head, self._byte], dst, 0)
            sent = request.Test()
        if not sent:
            done = (lambda: None) if sending is None else sending.complete
            with self._lock:
                self._transfers.append(_Transfer([request], head, done))
        elif sending is not None:
            sending.complete()

    def _say(self, dst: int, word: _Word, lane: bytes, number: int = 0) -> None:
        with contextlib.suppress(self._mpi.module.Exception):  # who cannot be told hears of it otherwise
            self._post_head(dst, _WORD.pack(word, self._world, lane, number))

    def _finish_soon(self, operation: PendingTransfer) -> bool:
        return self.wait([operation], Deadline(ENDING))

    def _forget(self, sending: Sending) -> None:
        with self._lock:
            sending.inbox.sending.discard(sending)


def _are_settled(operations: Sequence[PendingTransfer]) -> bool:
    """Whether there is nothing to wait for any more: all are done, or one has failed."""
    waiting = False
    for operation in operations:
        if not operation.done:
            waiting = True
        elif operation.error is not None:
            return True
    return not waiting


_Job = tuple[PendingTransfer, Deadline, Callable[[], None]]


class _Mover:
    """The thread that moves messages for which nobody waits. It sleeps as long as there are none."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._jobs: list[_Job] = []
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="phalanx-mpi", daemon=True)
        self._thread.start()

    def add(self, operation: PendingTransfer, deadline: Deadline, expire: Callable[[], None]) -> None:
        with self._changed:
            self._jobs.append((operation, deadline, expire))
            self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(STOP_WAIT)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._stopping:
                    self._changed.wait()
                if self._stopping:
                    return
            self._move()

    def _move(self) -> None:
        # A function of its own: what is done must not stay in its variables, which would keep the group alive.
        patience = Patience(crowded=True)
        while not self._stopping:
            try:
                moved = bool(self._post.progress())
            except PhalanxError as error:
                moved = True
                for operation, _, _ in self._jobs:
                    if not operation.done:
                        operation.complete(error)
            now = time.monotonic()
            for operation, deadline, expire in self._jobs[:]:
                if deadline.at <= now and not operation.done:
                    try:
                        expire()
                    except Exception as error:  # it must not end the others' service
                        operation.complete(error)
            with self._changed:
                self._jobs = [job for job in self._jobs if not job[0].done]
                if not self._jobs:
                    return
            if moved:
                patience.renew()
            else:
                patience.pause()
