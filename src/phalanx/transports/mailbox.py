"""Matches messages with receives, by source and tag, in order. No I/O.

A receive is posted before or after its message arrives. If before, the payload is read straight into the receiver's
memory; if after, it waits in memory of its own. Messages from one source with one tag are matched in the order in which
they were sent, receives in the order in which they were posted. A match is found by looking at four places at most,
however many messages or receives wait.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager as Lock
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from ..errors import SizeMismatch
from ..interrupts import is_of_a_signal
from ..wire.frames import FrameKind
from .waker import Waker

__all__ = ["Arrival", "BufferSink", "Envelope", "Mailbox", "PendingTransfer", "Receive", "Sink"]


class Envelope(NamedTuple):
    """A message without its payload. `src` is a rank of the lane."""

    src: int
    kind: FrameKind
    tag: int
    description: bytes
    size: int


class Sink(ABC):
    """The destination of a payload."""

    takes_plain_bytes = False
    """True if it needs no description of the message."""
    takes_another = True
    """True if another message may come in the place of one that was taken back."""
    receive: weakref.ref[Receive] | None = None
    """The receive that it was posted for. Set before anything can arrive, so that a caller that is interrupted inside
    `post` can take the receive back: the memory of a call that has raised is not written to any more."""

    @abstractmethod
    def open(self, envelope: Envelope) -> memoryview:
        """Memory for exactly `envelope.size` bytes.

        An exception refuses the message: it is dropped, the receive fails.
        """

    def take(self, envelope: Envelope, payload: memoryview) -> None:
        """Takes a payload that arrived before the receive was posted."""
        self.open(envelope)[:] = payload


class BufferSink(Sink):
    """A buffer that must be filled exactly."""

    takes_plain_bytes = True

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def open(self, envelope: Envelope) -> memoryview:
        if envelope.size != len(self._view):
            raise SizeMismatch(len(self._view), envelope.size, peer=envelope.src)
        return self._view


class PendingTransfer:
    """A send or receive under way. Whichever thread moves the bytes completes it."""

    __slots__ = ("_callbacks", "_wakers", "done", "error", "withdrawn")

    def __init__(self) -> None:
        self.done = False
        self.withdrawn = False
        """True if it was taken back before it was done."""
        self.error: BaseException | None = None
        self._wakers: list[Waker] = []
        self._callbacks: list[Callable[[], None]] = []

    def add_waker(self, waker: Waker) -> None:
        """Wakes that thread when the operation is done."""
        self._wakers.append(waker)
        if self.done:
            waker.set()

    def remove_waker(self, waker: Waker) -> None:
        """Undoes `add_waker`, also of one that was never added."""
        if waker in self._wakers:
            self._wakers.remove(waker)

    def on_done(self, callback: Callable[[], None]) -> None:
        """Calls back once, from the thread that completes the operation; at once if it is done."""
        self._callbacks.append(callback)
        if self.done:
            self._run_callbacks()

    def complete(self, error: BaseException | None = None) -> None:
        """Marks the operation as done and tells everybody."""
        self.settle(error)
        self.announce()

    def settle(self, error: BaseException | None = None) -> None:
        """Marks the operation as done. A caller that holds a lock calls `announce` after it has released it."""
        self.error = error
        self.done = True

    def announce(self) -> None:
        """Tells everybody that it is done. Callbacks may do anything, so no lock may be held."""
        for waker in tuple(self._wakers):
            waker.set()
        self._run_callbacks()

    def _run_callbacks(self) -> None:
        while self._callbacks:
            try:
                callback = self._callbacks.pop()
            except IndexError:
                return  # two threads came at once
            try:
                callback()
            except BaseException as error:
                if is_of_a_signal(error):  # whoever announces it again calls it again
                    self._callbacks.append(callback)
                raise


class Receive(PendingTransfer):
    """A posted receive. `src` None means from anyone, `tag` None with any tag."""

    __slots__ = ("__weakref__", "arrival", "envelope", "number", "queued", "sink", "src", "tag")

    def __init__(self, src: int | None, tag: int | None, sink: Sink, number: int) -> None:
        super().__init__()
        self.src = src
        self.tag = tag
        self.sink = sink
        self.number = number
        """Counts the receives of a mailbox in the order in which they were posted."""
        self.queued = False
        """True while it waits in the mailbox."""
        self.envelope: Envelope | None = None
        self.arrival: Arrival | None = None


class Arrival:
    """A message whose payload is on its way. `view` is where it goes; None means it is dropped."""

    __slots__ = (
        "complete",
        "envelope",
        "handing",
        "lock",
        "mailbox",
        "number",
        "owned",
        "queued",
        "receive",
        "received",
        "refused_by",
        "view",
    )

    def __init__(self, mailbox: Mailbox, envelope: Envelope, number: int, lock: Lock[Any]) -> None:
        self.mailbox = mailbox
        self.envelope = envelope
        self.number = number
        """Counts the messages of a mailbox in the order in which they began."""
        self.queued = False
        """True while it waits in the mailbox."""
        self.lock = lock
        """Held by the thread that writes to `view`."""
        self.handing = threading.RLock()
        """Held by the thread that copies from `owned` into the receiver's memory."""
        self.receive: Receive | None = None
        self.refused_by: Receive | None = None
        """A receive that failed because of this message: still to be announced."""
        self.owned: memoryview | None = None
        self.view: memoryview | None = None
        self.received = 0
        self.complete = False

    def own(self) -> memoryview:
        """Gives the payload memory of its own. NumPy's is not cleared first, which counts for gigabytes."""
        self.owned = self.view = np.empty(self.envelope.size, np.uint8).data
        return self.owned

    def give_to(self, receive: Receive) -> None:
        """Brings the two together."""
        self.receive = receive
        receive.arrival = self
        receive.envelope = self.envelope

    def part(self) -> None:
        """Ends what `give_to` has begun: of a ring of references, only the collector would free the memory."""
        receive, self.receive = self.receive, None
        if receive is not None:
            receive.arrival = None


Key = tuple[int | None, int | None]
"""A source and a tag; None for any."""
T = TypeVar("T", "Arrival", Receive)


def _keys(envelope: Envelope) -> tuple[Key, Key, Key, Key]:
    """All keys under which a receive can ask for this message."""
    src, tag = envelope.src, envelope.tag
    return (src, tag), (src, None), (None, tag), (None, None)


class _Lines(Generic[T]):
    """Messages or receives that wait, in a line for each key, the oldest first. Adding and removing takes no search.

    `queued` decides whether an item waits. An interrupt may come between any two lines of this code, and leave in some
    lines what has gone from the others.
    """

    def __init__(self) -> None:
        self._lines: dict[Key, OrderedDict[int, T]] = {}

    def first(self, key: Key) -> T | None:
        """The oldest in the line of this key."""
        line = self._lines.get(key)
        while line:
            item = next(iter(line.values()))
            if item.queued:
                return item
            line.popitem(last=False)
        return None

    def add(self, item: T, keys: Iterable[Key]) -> None:
        """Puts an item into these lines: at their ends, or where it was if it is older than what is there."""
        item.queued = True
        number = item.number
        for key in keys:
            line = self._lines.setdefault(key, OrderedDict())
            late = bool(line) and next(reversed(line)) > number
            line[number] = item
            if late:
                self._restore_order(line, number)

    @staticmethod
    def _restore_order(line: OrderedDict[int, T], number: int) -> None:
        older: list[int] = list(itertools.takewhile(lambda known: known < number, line))
        for known in (number, *reversed(older)):
            line.move_to_end(known, last=False)

    def remove(self, item: T, keys: Iterable[Key]) -> None:
        """Takes an item out of these lines."""
        item.queued = False
        for key in keys:
            line = self._lines.get(key)
            if line is not None:
                line.pop(item.number, None)
                if not line:
                    del self._lines[key]

    def lines(self) -> Iterator[tuple[Key, list[T]]]:
        """All lines, as they are now."""
        for key, line in list(self._lines.items()):
            yield key, [item for item in line.values() if item.queued]

    def __len__(self) -> int:
        return len({item.number for _, line in self.lines() for item in line})

    def clear(self) -> None:
        """Forgets all."""
        self._lines.clear()


def _leave_it(rest: Receive) -> None:
    """For a mailbox to which messages come whole."""


class Mailbox:
    """The receives and messages of one lane."""

    def __init__(self) -> None:
        # Re-entrant, as all locks of lanes and channels: a signal handler that ends the world, or the collection of a
        # group that nobody holds any more, may come at any point of a thread that has the lock.
        self._lock = threading.RLock()
        self._posted: _Lines[Receive] = _Lines()
        """Receives without a message, each in the line of what it asks for."""
        self._waiting: _Lines[Arrival] = _Lines()
        """Messages without a receive, each in the lines of all that may be asked for to get it."""
        self.ahead: dict[int | None, int] = {}
        """The number of both, by source: a receive on the fast path would overtake them. Sources with none are left
        out. This dictionary is never replaced, because the fast path of messages holds it, too."""
        self._numbers = itertools.count()
        self._gone: dict[int, BaseException] = {}
        self._error: BaseException | None = None
        self.on_refusal: Callable[[Receive], None] = _leave_it
        """Called with a receive for what is still to come of a message that was refused. It is dropped, but somebody
        has to take it off the wire: its sender waits for that."""
        self.sources: frozenset[int] | None = None
        """All who may ever send, where that is known: once they are gone, a receive from anyone is of no use."""

    # -- the receiver's side -----------------------------------------------------------------------------------------

    def post(self, src: int | None, tag: int | None, sink: Sink) -> Receive:
        """Announces a receive; it may be done at once."""
        receive = Receive(src, tag, sink, next(self._numbers))
        sink.receive = weakref.ref(receive)
        with self._lock:
            arrival = self._take_first_for(receive)
        if arrival is None:
            return receive
        try:
            self._hand_over(arrival)
        except BaseException:  # Ctrl-C: the caller will never know of this receive, even if it is done
            with self._lock:
                receive.withdrawn = True
                self._put_back(arrival)
            raise
        return receive

    def _take_first_for(self, receive: Receive) -> Arrival | None:
        """Gives a receive the first message that matches it, or lets it wait. The caller holds the lock.

        Returns:
            The message if it is complete: it is to be handed over.
        """
        src, tag = receive.src, receive.tag
        if self._error is not None:
            receive.settle(self._error)
            return None
        arrival = self._waiting.first((src, tag))
        if arrival is None:
            if src is not None and src in self._gone:
                receive.settle(self._gone[src])
            elif src is None and self._no_source_left():
                receive.settle(next(reversed(self._gone.values())))
            else:
                self._count(src, 1)
                self._posted.add(receive, [(src, tag)])
            return None
        self._forget_arrival(arrival)
        arrival.give_to(receive)
        return arrival if arrival.complete else None

    def withdraw(self, receive: Receive) -> bool:
        """Takes a receive back, as after a timeout.

        False if it was done already, or taken back before. Its message, if any, stays for the next receive.
        """
        with self._lock:
            if receive.done or receive.withdrawn:
                return False
            self._forget_receive(receive)
            arrival = receive.arrival
            if arrival is None:
                receive.withdrawn = True
                return True
        # The payload is on its way into the receiver's memory. The thread that writes there holds one of these locks.
        with arrival.lock, arrival.handing, self._lock:
            if receive.done or receive.withdrawn:
                return False
            if arrival.owned is None:  # bend the rest of it elsewhere
                filled = arrival.view
                kept = arrival.own()
                if filled is not None:
                    kept[: arrival.received] = filled[: arrival.received]
            receive.withdrawn = True
            self._put_back(arrival)
            complete = arrival.complete
        if complete:
            self._hand_over(arrival)
        return True

    # -- the sender's side, called by the thread that moves the bytes --------------------------------------------------

    def begin(self, envelope: Envelope, lock: Lock[Any]) -> Arrival:
        """A message begins to arrive: decides where its payload goes.

        The caller, who holds `lock`, announces `refused_by` when it is released, and then calls `on_refusal`.
        """
        arrival = Arrival(self, envelope, next(self._numbers), lock)
        with self._lock:
            if self._error is not None:
                return arrival  # nobody will ever receive it
            receive = self._pair(arrival)
            if receive is None:
                arrival.own()
                self._keep(arrival)
                return arrival
            try:
                arrival.view = receive.sink.open(envelope)
            except BaseException as error:
                if not isinstance(error, Exception) or is_of_a_signal(error):
                    self._unpair(arrival, receive)
                    raise  # the channel ends, and the receive with it
                arrival.refused_by = receive
                arrival.give_to(Receive(envelope.src, envelope.tag, receive.sink, next(self._numbers)))
                receive.settle(error)
        return arrival

    def adopt(self, envelope: Envelope, lock: Lock[Any], sink: Sink, received: int) -> tuple[Receive, Arrival]:
        """A message and its receive that met elsewhere, after `received` bytes. The caller holds `lock`."""
        receive = Receive(envelope.src, envelope.tag, sink, next(self._numbers))
        arrival = Arrival(self, envelope, next(self._numbers), lock)
        with self._lock:
            arrival.give_to(receive)
            arrival.view = sink.open(envelope)
            arrival.received = received
            # A signal handler may have ended the world since: nobody will go on with the message.
            ended = self._error or self._gone.get(envelope.src)
            if ended is not None:
                receive.settle(ended)
        return receive, arrival

    def finish(self, arrival: Arrival) -> None:
        """The payload is complete."""
        with self._lock:
            arrival.complete = True
            receive = arrival.receive
            if receive is None:
                return
            in_place = arrival.owned is None
            if in_place:
                receive.settle()
        if in_place:
            receive.announce()
            arrival.part()
        else:
            self._hand_over(arrival)

    def deliver(self, envelope: Envelope, payload: memoryview) -> None:
        """A whole message at once; the payload is copied."""
        lock = threading.RLock()
        with lock:
            arrival = self.begin(envelope, lock)
            if arrival.view is not None:
                arrival.view[:] = payload
            arrival.received = envelope.size
        if arrival.refused_by is not None:
            arrival.refused_by.announce()
        self.finish(arrival)

    def _pair(self, arrival: Arrival) -> Receive | None:
        """Gives a message to the first receive that matches it. The caller holds the lock."""
        found = [receive for key in _keys(arrival.envelope) if (receive := self._posted.first(key)) is not None]
        if not found:
            return None
        receive = min(found, key=lambda one: one.number)
        arrival.give_to(receive)  # first: after an interrupt in between, it can still be taken back
        self._forget_receive(receive)
        return receive

    def _unpair(self, arrival: Arrival, receive: Receive) -> None:
        """Undoes `_pair`. The caller holds the lock."""
        arrival.part()
        receive.envelope = None
        self._count(receive.src, 1)
        self._posted.add(receive, [(receive.src, receive.tag)])

    def _keep(self, arrival: Arrival) -> None:
        """Lets a message wait for its receive. The caller holds the lock."""
        self._count(arrival.envelope.src, 1)
        self._waiting.add(arrival, _keys(arrival.envelope))

    def _forget_arrival(self, arrival: Arrival) -> None:
        if arrival.queued:
            self._waiting.remove(arrival, _keys(arrival.envelope))
            self._count(arrival.envelope.src, -1)

    def _forget_receive(self, receive: Receive) -> None:
        if receive.queued:
            self._posted.remove(receive, [(receive.src, receive.tag)])
            self._count(receive.src, -1)

    def _count(self, src: int | None, change: int) -> None:
        """Counts before something is added, and after it was removed: an interrupt leaves too many, never too few."""
        count = self.ahead.get(src, 0) + change
        if count > 0:
            self.ahead[src] = count
        else:
            self.ahead.pop(src, None)

    def _put_back(self, arrival: Arrival) -> None:
        """A message has lost its receive. The caller holds the lock."""
        arrival.receive = None
        if not arrival.complete and arrival.envelope.src in self._gone:
            return  # the rest of it will not come
        # Another may have been posted in the meantime, and must not be overtaken by what comes later.
        if self._pair(arrival) is None:
            self._keep(arrival)

    def _hand_over(self, arrival: Arrival) -> None:
        """Copies a message that had to wait into the receiver's memory."""
        assert arrival.owned is not None
        with arrival.handing:
            receive = arrival.receive
            if receive is None:
                return  # it was taken back just now
            if not receive.done:
                error: Exception | None = None
                try:
                    receive.sink.take(arrival.envelope, arrival.owned)
                except Exception as refused:
                    if is_of_a_signal(refused):
                        raise
                    error = refused
                receive.settle(error)
        receive.announce()
        arrival.part()

    # -- ends --------------------------------------------------------------------------------------------------------

    def gone(self, src: int, error: BaseException) -> None:
        """Nothing more will come from `src`. What has come can still be received."""
        for receive in self.mark_gone(src, error):
            receive.announce()

    def mark_gone(self, src: int, error: BaseException) -> list[Receive]:
        """As `gone`, for a caller that holds a lock. Returns the receives that failed, to be announced later."""
        with self._lock:
            self._gone.setdefault(src, error)
            no_source_left = self._no_source_left()
            hopeless = {src, None} if no_source_left else {src}
            failed = [receive for (of, _), line in self._posted.lines() if of in hopeless for receive in line]
            for receive in failed:
                receive.settle(error)
                self._forget_receive(receive)
            for key, line in self._waiting.lines():
                for arrival in line if key == (src, None) else ():
                    if not arrival.complete:
                        self._forget_arrival(arrival)
        return failed

    def _no_source_left(self) -> bool:
        return bool(self.sources) and all(src in self._gone for src in self.sources or ())

    def cut(self, arrival: Arrival, error: BaseException) -> None:
        """The rest of a message will not come."""
        with self._lock:
            receive, arrival.receive = arrival.receive, None
            arrival.complete = True
            self._forget_arrival(arrival)
            if receive is not None:
                receive.settle(error)
        if receive is not None:
            receive.announce()

    def call_off(self, arrival: Arrival, error: BaseException) -> None:
        """The sender has taken a message back of which nothing was on its way. Its receive waits for the next one.

        Args:
            error: Ends a receive that only this message fits.
        """
        receive = arrival.receive
        if receive is None or not receive.sink.takes_another:
            self.cut(arrival, error)
            return
        with self._lock:
            arrival.receive, arrival.complete = None, True
            if receive.done or receive.withdrawn:
                return
            receive.arrival = receive.envelope = None
            following = self._take_first_for(receive)
        if following is not None:
            self._hand_over(following)
        elif receive.done:
            receive.announce()

    def fail(self, error: BaseException) -> None:
        """Ends everything, for good, with the first error."""
        with self._lock:
            if self._error is None:
                self._error = error
            failed = [receive for _, line in self._posted.lines() for receive in line]
            self._posted.clear()
            self._waiting.clear()
            self.ahead.clear()
            for receive in failed:
                receive.settle(self._error)
        for receive in failed:
            receive.announce()
