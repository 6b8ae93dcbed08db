"""Messages of remote calls on the classic wire: sent to and received from every rank, in order.

They go over one ordered stream per pair of ranks, the backend's own. One thread per agent drives them (see `calls`). It
never sends: sending may have to connect first, and meanwhile no answer could be received.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np

from ...backends import SubBackend
from ...backends.base import LaneBackend
from ...backends.lane import Lane
from ...backends.plain import AdaptedBackend
from ...backends.polling import sleep
from ...background_thread import BackgroundThread
from ...deadline import Deadline
from ...errors import InvalidMessage, NoConnection, UsageError
from ...transports.mailbox import Envelope, PendingTransfer, Receive, Sink
from ...transports.waker import Waker
from ...wire.classic.calls import MAX_REMOTE_CALL
from ...wire.frames import FrameKind
from .framing import ClassicReader

__all__ = ["ClassicMessages", "ClassicPeer", "Received"]

Received = memoryview | bytes | BaseException
"""A message, why it was refused, or why no more will come."""

_served: weakref.WeakSet[Lane] = weakref.WeakSet()
"""Lanes that belong to an agent: two would take each other's messages."""


class _MessageSink(Sink):
    """Memory for a message of any allowed length."""

    def __init__(self) -> None:
        self.data = memoryview(b"")
        self.refused: InvalidMessage | None = None

    def open(self, envelope: Envelope) -> memoryview:
        self._check(envelope.size)
        try:
            self.data = np.empty(envelope.size, np.uint8).data
        except MemoryError:
            self.refused = InvalidMessage(f"not enough memory for a message of {envelope.size} bytes")
            raise self.refused from None
        return self.data

    def take(self, envelope: Envelope, payload: memoryview) -> None:
        self._check(envelope.size)
        self.data = payload  # no other code uses that memory

    def _check(self, size: int) -> None:
        if size > MAX_REMOTE_CALL:
            limit = MAX_REMOTE_CALL
            self.refused = InvalidMessage(f"a message of {size} bytes is too large (at most {limit} are allowed)")
            raise self.refused


class ClassicPeer:
    """A rank to talk to. `rank` is its rank of the backend, `lane_rank` of the lane."""

    def __init__(self, rank: int, lane_rank: int) -> None:
        self.rank = rank
        self.lane_rank = lane_rank
        self.sending = threading.RLock()
        """Held while a message is queued: nothing may come between the two messages of a response."""
        self.posting = threading.RLock()
        """Held while a receive is posted."""
        self.receive: Receive | None = None
        self.reader = ClassicReader()
        """Only the agent's thread uses this and the next."""
        self.warned = False
        self.error: BaseException | None = None
        """Why nothing more can be sent to it or received from it."""


class ClassicMessages:
    """Sends messages for any thread, and collects received ones for the agent's own thread.

    Raises:
        UsageError: Another agent uses the backend's messages.
    """

    def __init__(self, backend: LaneBackend) -> None:
        self.rank = backend.rank
        self.lane, lane_ranks, self._owns_lane = _stream_of(backend)
        if self.lane in _served:
            raise UsageError(f"rank {self.rank} has an agent on this backend already (close it first)")
        _served.add(self.lane)
        self.peers = [ClassicPeer(rank, lane_rank) for rank, lane_rank in enumerate(lane_ranks)]
        self.inbox: deque[tuple[ClassicPeer, Received]] = deque()
        self.waker = Waker()
        self.thread: BackgroundThread | None = None
        """The agent's own thread, which drives this."""
        self._lock = threading.RLock()
        self._unsent: list[tuple[PendingTransfer, Callable[[BaseException], None] | None]] = []
        """Messages that are being sent, and what to call if one cannot be."""
        self._stopping = False
        self.lane.add_sleeper(self.waker)

    # -- sending -------------------------------------------------------------------------------------------------------

    def send(
        self,
        peer: ClassicPeer,
        message: bytes,
        deadline: Deadline,
        on_error: Callable[[BaseException], None] | None = None,
    ) -> PendingTransfer | None:
        """Queues a message; returns what sends it, or None if it is for this rank.

        Called with `peer.sending` held, and never by the agent's own thread.

        Args:
            on_error: Told if the message cannot be sent after all, by the agent's thread. What fails at once is in the
                operation.
        """
        if peer.rank == self.rank:
            self.inbox.append((peer, message))
            self.waker.set()
            return None
        operation = self.lane.start_send(peer.lane_rank, FrameKind.RAW, 0, b"", [message], deadline)
        if not operation.done:
            with self._lock:
                self._unsent.append((operation, on_error))
            operation.add_waker(self.waker)
            self.waker.set()
        return operation

    def report_failures(self) -> None:
        """Tells the senders of messages that could not be sent. Called by the agent's thread."""
        with self._lock:
            done = [(operation, on_error) for operation, on_error in self._unsent if operation.done]
            self._unsent = [pair for pair in self._unsent if not pair[0].done and not pair[0].withdrawn]
        for operation, on_error in done:
            if operation.error is not None and on_error is not None:
                on_error(operation.error)

    def flush(self, deadline: Deadline) -> None:
        """Waits until what was queued is sent."""
        while not deadline.expired:
            with self._lock:
                unsent = [operation for operation, _ in self._unsent if not operation.done and not operation.withdrawn]
            if not unsent:
                return
            self.lane.wait(unsent, deadline)

    # -- receiving -----------------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Receives from all ranks that can be reached."""
        for peer in self.peers:
            if peer.rank != self.rank:
                try:
                    self._listen(peer)
                except NoConnection as error:  # between two workers of the star
                    peer.error = error

    def _listen(self, peer: ClassicPeer) -> None:
        """Has a receive posted at all times: a message that finds none would be stored unchecked."""
        while True:
            sink = _MessageSink()
            with peer.posting:
                if self._stopping:
                    return
                receive = peer.receive = self.lane.post(peer.lane_rank, 0, sink)
            if not receive.done:
                receive.on_done(functools.partial(self._came, peer, receive, sink))
                return
            if not self._keep(peer, receive, sink):
                return

    def _came(self, peer: ClassicPeer, receive: Receive, sink: _MessageSink) -> None:
        """Called when a receive is done, by the thread that moved the bytes."""
        if self._keep(peer, receive, sink):
            self._listen(peer)

    @property
    def in_own_thread(self) -> bool:
        """True if the caller is the agent's own thread."""
        return self.thread is not None and self.thread.is_current

    def _keep(self, peer: ClassicPeer, receive: Receive, sink: _MessageSink) -> bool:
        """Puts a received message or an error into the inbox; False if no more will come."""
        refused = receive.error is not None and receive.error is sink.refused
        self.inbox.append((peer, sink.data if receive.error is None else receive.error))
        if not self.in_own_thread:
            self.waker.set()
        return receive.error is None or refused

    def drive(self, until: Deadline) -> None:
        """Moves what can be moved, else sleeps until something comes, the waker is set, or that time has come."""
        with self._lock:
            sends = [operation for operation, _ in self._unsent]
        receives = [peer.receive for peer in self.peers if peer.receive is not None and peer.error is None]
        polled = self.lane.drive([*receives, *sends])
        if polled is not None and not self.inbox:
            sleep(self.waker, polled, until)

    # -- the end -------------------------------------------------------------------------------------------------------

    def stop_listening(self) -> None:
        """Posts no more receives."""
        self._stopping = True

    def withdraw_receives(self) -> None:
        """Takes the receives back. Their messages, if any are on their way, are for the next receive."""
        for peer in self.peers:
            with peer.posting:
                receive = peer.receive
            if receive is not None:
                self.lane.withdraw(receive)

    def release(self) -> None:
        """Gives the lane back."""
        self.lane.remove_sleeper(self.waker)
        _served.discard(self.lane)
        if self._owns_lane:
            self.lane.close()


def _stream_of(backend: LaneBackend) -> tuple[Lane, list[int], bool]:
    """The lane of a backend's own messages, the rank in it of each of the backend's ranks, and whether to close it."""
    ranks = list(range(backend.world_size))
    if isinstance(backend, AdaptedBackend):  # its threads live as long as it has lanes
        return backend.open_lane(backend.next_context("classic-calls"), 0, ranks), ranks, True
    while isinstance(backend, SubBackend) and backend._share_stream:
        ranks = [backend.to_global(rank) for rank in ranks]
        backend = backend._lanes_of
    return backend.raw_messages().lane, ranks, False
