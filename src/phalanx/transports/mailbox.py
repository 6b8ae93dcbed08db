"""Where messages meet receives: matching by source and tag, in order. No I/O.

A receive is posted before or after its message arrives. If before, the payload is read straight into the receiver's
memory; if after, it waits in memory of its own. Messages from one source with one tag are matched in the order in which
they were sent, receives in the order in which they were posted.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..errors import SizeMismatch
from ..wire.frames import Kind
from .waker import Waker

__all__ = ["Arrival", "BufferSink", "Envelope", "Mailbox", "Operation", "Receive", "Sink"]


class Envelope(NamedTuple):
    """A message without its payload. `src` is a rank of the lane."""

    src: int
    kind: Kind
    tag: int
    description: bytes
    size: int


class Sink(ABC):
    """Where the payload of a receive goes."""

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

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def open(self, envelope: Envelope) -> memoryview:
        if envelope.size != len(self._view):
            raise SizeMismatch(len(self._view), envelope.size, peer=envelope.src)
        return self._view


class Operation:
    """Something that will be done, by whichever thread moves the bytes. Base of receives and sends under way."""

    __slots__ = ("_callbacks", "_wakers", "done", "error", "withdrawn")

    def __init__(self) -> None:
        self.done = False
        self.withdrawn = False
        """Whether it was taken back before it was done."""
        self.error: BaseException | None = None
        self._wakers: list[Waker] = []
        self._callbacks: list[Callable[[], None]] = []

    def add_waker(self, waker: Waker) -> None:
        """Wakes that thread when the operation is done."""
        self._wakers.append(waker)
        if self.done:
            waker.set()

    def remove_waker(self, waker: Waker) -> None:
        """Undoes `add_waker`."""
        self._wakers.remove(waker)

    def on_done(self, callback: Callable[[], None]) -> None:
        """Calls back once, from the thread that completes the operation; at once if it is done."""
        self._callbacks.append(callback)
        if self.done:
            self._run_callbacks()

    def complete(self, error: BaseException | None = None) -> None:
        """Marks the operation as done."""
        self.error = error
        self.done = True
        for waker in tuple(self._wakers):
            waker.set()
        self._run_callbacks()

    def _run_callbacks(self) -> None:
        while self._callbacks:
            try:
                callback = self._callbacks.pop()
            except IndexError:
                return  # two threads came at once
            callback()


class Receive(Operation):
    """A posted receive. `src` None means from anyone, `tag` None with any tag."""

    __slots__ = ("arrival", "envelope", "sink", "src", "tag")

    def __init__(self, src: int | None, tag: int | None, sink: Sink) -> None:
        super().__init__()
        self.src = src
        self.tag = tag
        self.sink = sink
        self.envelope: Envelope | None = None
        self.arrival: Arrival | None = None

    def matches(self, envelope: Envelope) -> bool:
        return (self.src is None or self.src == envelope.src) and (self.tag is None or self.tag == envelope.tag)


class Arrival:
    """A message whose payload is on its way. `view` is where it goes; None means it is dropped."""

    __slots__ = ("complete", "envelope", "lock", "mailbox", "owned", "receive", "received", "view")

    def __init__(self, mailbox: Mailbox, envelope: Envelope, lock: threading.Lock | threading.RLock) -> None:
        self.mailbox = mailbox
        self.envelope = envelope
        self.lock = lock
        """Held by whoever writes to `view`."""
        self.receive: Receive | None = None
        self.owned: memoryview | None = None
        self.view: memoryview | None = None
        self.received = 0
        self.complete = False

    def own(self) -> memoryview:
        """Gives the payload memory of its own. NumPy's is not cleared first, which counts for gigabytes."""
        self.owned = self.view = np.empty(self.envelope.size, np.uint8).data
        return self.owned


class Mailbox:
    """The receives and messages of one lane."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._posted: list[Receive] = []
        self._waiting: list[Arrival] = []
        self._gone: dict[int, BaseException] = {}
        self._error: BaseException | None = None
        self.sources: frozenset[int] | None = None
        """All who may ever send, where that is known: once they are gone, a receive from anyone is of no use."""

    # -- the receiver's side -----------------------------------------------------------------------------------------

    def post(self, src: int | None, tag: int | None, sink: Sink) -> Receive:
        """Announces a receive; it may be done at once."""
        receive = Receive(src, tag, sink)
        with self._lock:
            if self._error is not None:
                receive.complete(self._error)
                return receive
            arrival = next((a for a in self._waiting if receive.matches(a.envelope)), None)
            if arrival is None:
                if src is not None and src in self._gone:
                    receive.complete(self._gone[src])
                elif src is None and self._nobody_left():
                    receive.complete(next(reversed(self._gone.values())))
                else:
                    self._posted.append(receive)
                return receive
            self._waiting.remove(arrival)
            receive.envelope = arrival.envelope
            if not arrival.complete:
                receive.arrival = arrival
                arrival.receive = receive
                return receive
        self._hand_over(receive, arrival)
        return receive

    def withdraw(self, receive: Receive) -> bool:
        """Takes a receive back, as after a timeout.

        False if it was done already, or taken back before. Its message, if any, stays for a later one.
        """
        with self._lock:
            if receive in self._posted:
                self._posted.remove(receive)
                receive.withdrawn = True
                return True
            arrival = receive.arrival
        if receive.done or receive.withdrawn or arrival is None:
            return False
        # The payload is on its way into the receiver's memory: bend the rest of it elsewhere.
        with arrival.lock, self._lock:
            if not arrival.complete and arrival.receive is receive:
                if arrival.owned is None:
                    filled = arrival.view
                    kept = arrival.own()
                    if filled is not None:
                        kept[: arrival.received] = filled[: arrival.received]
                arrival.receive = None
                self._waiting.append(arrival)
                receive.withdrawn = True
                return True
        # Another thread has the whole message and is handing it over: a copy in memory, which ends soon.
        while not receive.done:
            time.sleep(0.0005)
        return False

    # -- the sender's side, called by whoever moves the bytes ----------------------------------------------------------

    def begin(self, envelope: Envelope, lock: threading.Lock | threading.RLock) -> Arrival:
        """A message begins to arrive: decides where its payload goes."""
        arrival = Arrival(self, envelope, lock)
        refused: BaseException | None = None
        with self._lock:
            receive = next((r for r in self._posted if r.matches(envelope)), None)
            if receive is None:
                arrival.own()
                self._waiting.append(arrival)
                return arrival
            self._posted.remove(receive)
            receive.envelope = envelope
            receive.arrival = arrival
            arrival.receive = receive
            try:
                arrival.view = receive.sink.open(envelope)
            except Exception as error:
                refused = error
                arrival.receive = None
        if refused is not None:
            receive.complete(refused)
        return arrival

    def finish(self, arrival: Arrival) -> None:
        """The payload is complete."""
        with self._lock:
            arrival.complete = True
            receive = arrival.receive
            if receive is None:
                return
        if arrival.owned is None:
            receive.complete()
        else:
            self._hand_over(receive, arrival)

    def deliver(self, envelope: Envelope, payload: memoryview) -> None:
        """A whole message at once; the payload is copied."""
        lock = threading.Lock()
        with lock:
            arrival = self.begin(envelope, lock)
            if arrival.view is not None:
                arrival.view[:] = payload
            arrival.received = envelope.size
        self.finish(arrival)

    def _hand_over(self, receive: Receive, arrival: Arrival) -> None:
        assert arrival.owned is not None
        try:
            receive.sink.take(arrival.envelope, arrival.owned)
        except Exception as error:
            receive.complete(error)
        else:
            receive.complete()

    # -- ends --------------------------------------------------------------------------------------------------------

    def gone(self, src: int, error: BaseException) -> None:
        """Nothing more will come from `src`. What has come can still be received."""
        with self._lock:
            self._gone.setdefault(src, error)
            failed = [r for r in self._posted if r.src == src or (r.src is None and self._nobody_left())]
            self._posted = [r for r in self._posted if r not in failed]
            cut = [a for a in self._waiting if a.envelope.src == src and not a.complete]
            self._waiting = [a for a in self._waiting if a not in cut]
        for receive in failed:
            receive.complete(error)

    def _nobody_left(self) -> bool:
        return bool(self.sources) and self._gone.keys() >= self.sources

    def cut(self, arrival: Arrival, error: BaseException) -> None:
        """The rest of a message will not come."""
        with self._lock:
            receive = arrival.receive
            arrival.complete = True
            if arrival in self._waiting:
                self._waiting.remove(arrival)
        if receive is not None and not receive.done:
            receive.complete(error)

    def fail(self, error: BaseException) -> None:
        """Ends everything, for good, with the first error."""
        with self._lock:
            if self._error is None:
                self._error = error
            failed, self._posted = self._posted, []
            waiting, self._waiting = self._waiting, []
        for receive in failed:
            receive.complete(self._error)
        del waiting
