"""Groups on a backend of your own, which has only the six methods of `Backend`.

Every frame travels as two plain messages: a head of fixed size that says what follows, and the body. One thread per
peer receives and one sends, because a plain backend can neither be polled nor interrupted; every `LOOK_UP` seconds a
receiving thread checks whether it is still needed. While a group uses the backend, do not call its own `send` and
`recv`: a plain backend cannot tell the two kinds of message apart.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence

from ..arguments import shown
from ..background_thread import BackgroundThread
from ..config import timeouts
from ..deadline import Deadline
from ..errors import PeerLost, PhalanxError, Timeout, UsageError
from ..transports.channel import Inbound
from ..transports.mailbox import Envelope, Mailbox, PendingTransfer
from ..transports.stream import Buffer
from ..wire.frames import HEADER_SIZE, FrameKind, pack_header, parse_header
from .base import Backend, LaneBackend
from .bounded_set import BoundedSet
from .contexts import WORLD_CONTEXT, derive_context
from .control_plane import ControlPlane
from .lane import Lane, payload_size
from .lane_thread import STOP_WAIT

__all__ = ["AdaptedBackend", "as_lane_backend"]

logger = logging.getLogger("phalanx.backends")

LANE_ID_SIZE = 16
LOOK_UP = 0.2

_QueuedMessage = tuple[int, Sequence[Buffer], PendingTransfer]
"""The receiver, the parts of a message, and the operation that completes when it is sent."""


def as_lane_backend(backend: Backend) -> LaneBackend:
    """The backend itself if it has lanes; else the one adapter of it, shared by all groups on it.

    Raises:
        UsageError: `backend` is not a `Backend`.
    """
    if isinstance(backend, LaneBackend):
        return backend
    if not isinstance(backend, Backend):
        raise UsageError(f"backend={shown(backend)} is not valid (expected a phalanx.backends.Backend)")
    if backend._adapter is None:
        backend._adapter = AdaptedBackend(backend)
    return backend._adapter


class AdaptedBackend(LaneBackend):
    """Adds lanes to a plain backend."""

    def __init__(self, backend: Backend) -> None:
        size = backend.world_size
        super().__init__(
            backend.rank, range(size), ControlPlane(backend.rank), context=WORLD_CONTEXT, timeouts=timeouts(None)
        )
        self._plain = backend
        self._mailboxes: dict[bytes, Mailbox] = {}
        self._gone: dict[int, PhalanxError] = {}
        self._open_lanes = 0
        self._closed_lanes: BoundedSet[bytes] = BoundedSet()
        self._threads: list[BackgroundThread] = []
        self._stop = threading.Event()
        self._outgoing: queue.SimpleQueue[_QueuedMessage | None] = queue.SimpleQueue()

    def open_lane(self, context: bytes, number: int, ranks: Sequence[int]) -> Lane:
        self.check_usable()
        lane_id = derive_context(context, "lane", number)
        with self._lock:
            self._open_lanes += 1
            if not self._threads:
                self._start()
        return _AdaptedLane(self, lane_id, list(ranks).index(self._rank), ranks, self._mailbox(lane_id))

    def _mailbox(self, lane_id: bytes) -> Mailbox:
        """The mailbox of a lane, also of one that this rank has not opened yet."""
        with self._lock:
            mailbox = self._mailboxes.get(lane_id)
            if mailbox is None:
                mailbox = self._mailboxes[lane_id] = Mailbox()
                for peer, error in self._gone.items():
                    mailbox.gone(peer, error)
            return mailbox

    def send_soon(self, dst: int, parts: Sequence[Buffer], operation: PendingTransfer) -> None:
        """Hands a message to the sending thread."""
        self._outgoing.put((dst, parts, operation))

    def lane_closed(self, lane_id: bytes) -> None:
        """Forgets a lane. The last one to close ends the threads."""
        with self._lock:
            self._mailboxes.pop(lane_id, None)
            self._closed_lanes.add(lane_id)
            self._open_lanes -= 1
            if self._open_lanes:
                return
            threads, self._threads = self._threads, []
            self._stop.set()
            self._outgoing.put(None)
        for thread in threads:
            thread.join(STOP_WAIT)

    def _start(self) -> None:
        # New ones for each set of threads: those that were told to stop may take a moment.
        self._stop, self._outgoing = threading.Event(), queue.SimpleQueue()
        peers = [rank for rank in range(self.world_size) if rank != self._rank]
        targets: list[Callable[[], None]] = [functools.partial(self._send, self._outgoing)]
        targets += [functools.partial(self._receive, peer, self._stop) for peer in peers]
        self._threads = [BackgroundThread(target, "phalanx-adapter") for target in targets]
        for thread in self._threads:
            thread.start()

    def _send(self, outgoing: queue.SimpleQueue[_QueuedMessage | None]) -> None:
        while (item := outgoing.get()) is not None:
            dst, parts, operation = item
            error: PhalanxError | None = None
            if operation.withdrawn:
                continue
            try:
                for part in parts:
                    self._plain.send(part, dst)
            except Exception as failure:
                error = _as_phalanx_error(failure, dst)
            try:
                operation.complete(error)
            except Exception:  # a callback's: the messages of others still have to be sent
                logger.exception("a callback failed after a message to rank %d", dst)

    def _receive(self, peer: int, stop: threading.Event) -> None:
        head = bytearray(LANE_ID_SIZE + HEADER_SIZE)
        while not stop.is_set():
            try:
                try:
                    self._plain.recv(head, peer, timeout=LOOK_UP)
                except Timeout:
                    continue
                self._receive_body(bytes(head), peer)
            except Exception as failure:
                error = _as_phalanx_error(failure, peer)
                with self._lock:
                    self._gone[peer] = error
                    mailboxes = list(self._mailboxes.values())
                for mailbox in mailboxes:
                    mailbox.gone(peer, error)
                return

    def _receive_body(self, head: bytes, peer: int) -> None:
        lane_id, limits = head[:LANE_ID_SIZE], self.options
        header = parse_header(head[LANE_ID_SIZE:], max_message=limits.max_message, max_object=limits.max_object)
        body = memoryview(bytearray(header.description + header.payload))
        if body:
            self._plain.recv(body, peer)
        if lane_id not in self._closed_lanes:
            envelope = Envelope(peer, header.kind, header.tag, bytes(body[: header.description]), header.payload)
            self._mailbox(lane_id).deliver(envelope, body[header.description :])


def _as_phalanx_error(error: Exception, peer: int) -> PhalanxError:
    return error if isinstance(error, PhalanxError) else PeerLost(peer, f"{type(error).__name__}: {error}")


class _AdaptedLane(Lane):
    """A lane whose bytes are moved by the adapter's threads. Its mailbox knows members by the backend's ranks."""

    def __init__(
        self, adapter: AdaptedBackend, lane_id: bytes, rank: int, members: Sequence[int], mailbox: Mailbox
    ) -> None:
        super().__init__(rank, members, adapter.control)
        self.mailbox = mailbox
        self.mailbox.sources = frozenset(members) - {members[rank]}
        self._adapter = adapter
        self._lane_id = lane_id
        self._closed = False

    def source_of(self, envelope: Envelope) -> int:
        return self.members.index(envelope.src)

    def mailbox_source(self, src: int) -> int:
        return self.members[src]

    def start_send(
        self, dst: int, kind: FrameKind, tag: int, description: bytes, payload: Sequence[Buffer], deadline: Deadline
    ) -> PendingTransfer:
        operation = PendingTransfer()
        if self.error is not None:
            operation.complete(self.error)
            return operation
        head = self._lane_id + pack_header(kind, tag, len(description), payload_size(payload))
        body = b"".join([description, *payload])
        self._adapter.send_soon(self.members[dst], [head, body] if body else [head], operation)
        return operation

    def inbound(self, src: int | None) -> Iterable[Inbound]:
        return ()

    def close(self) -> None:
        super().close()
        with self._guard:
            closed, self._closed = self._closed, True
        if not closed:
            self._adapter.lane_closed(self._lane_id)

    def _end_channels(self, error: BaseException, goodbye: bool) -> None:
        pass  # it has none of its own
