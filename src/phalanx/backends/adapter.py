"""Groups on a backend of your own, which has only the six methods of `Backend`.

Every frame travels as two plain messages: a head of fixed size that says what follows, and the body. One thread per
peer receives and one sends, because a plain backend can neither be polled nor interrupted; each looks up every
`LOOK_UP` seconds to see whether it is still needed. While a group uses the backend, its own `send` and `recv` must
rest: a plain backend cannot tell the two kinds of message apart.
"""

from __future__ import annotations

import functools
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence

from ..deadline import Deadline
from ..errors import ChannelClosed, PeerLost, PhalanxError, Timeout
from ..transports.channel import Inbound
from ..transports.mailbox import Envelope, Mailbox, Operation
from ..transports.stream import Buffer
from ..wire.frames import HEADER_SIZE, Kind, pack_header, parse_header
from .base import DEFAULT_TIMEOUT, WORLD_CONTEXT, Backend, LaneBackend, derive_context, payload_size
from .control_plane import ControlPlane
from .lane import Lane

__all__ = ["AdaptedBackend", "as_lane_backend"]

LANE_ID_SIZE = 16
LOOK_UP = 0.2

_adapted: weakref.WeakKeyDictionary[Backend, AdaptedBackend] = weakref.WeakKeyDictionary()


def as_lane_backend(backend: Backend) -> LaneBackend:
    """The backend itself if it has lanes; else the one adapter of it, shared by all groups on it."""
    if isinstance(backend, LaneBackend):
        return backend
    return _adapted.setdefault(backend, AdaptedBackend(backend))


class AdaptedBackend(LaneBackend):
    """Lanes on a plain backend."""

    def __init__(self, backend: Backend) -> None:
        size = backend.world_size
        super().__init__(
            backend.rank, range(size), ControlPlane(backend.rank), context=WORLD_CONTEXT, timeout=DEFAULT_TIMEOUT
        )
        self._plain = backend
        self._mailboxes: dict[bytes, Mailbox] = {}
        self._open_lanes = 0
        self._outgoing: queue.SimpleQueue[tuple[int, Sequence[Buffer], Operation] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def open_lane(self, context: bytes, number: int, ranks: Sequence[int]) -> Lane:
        self.check_usable()
        lane_id = derive_context(context, "lane", number)
        with self._lock:
            self._open_lanes += 1
            if not self._threads:
                self._start()
        return _AdaptedLane(self, lane_id, list(ranks).index(self._rank), ranks, self.mailbox(lane_id))

    def mailbox(self, lane_id: bytes) -> Mailbox:
        """The mailbox of a lane, also of one that this rank has not opened yet."""
        return self._mailboxes.setdefault(lane_id, Mailbox())

    def send_soon(self, dst: int, parts: Sequence[Buffer], operation: Operation) -> None:
        """Hands a message to the sending thread."""
        self._outgoing.put((dst, parts, operation))

    def lane_closed(self, lane_id: bytes) -> None:
        """The last lane that closes ends the threads."""
        with self._lock:
            self._mailboxes.pop(lane_id, None)
            self._open_lanes -= 1
            if self._open_lanes:
                return
            threads, self._threads = self._threads, []
        self._outgoing.put(None)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def _start(self) -> None:
        peers = [rank for rank in range(self.world_size) if rank != self._rank]
        targets: list[Callable[[], None]] = [self._send, *(functools.partial(self._receive, peer) for peer in peers)]
        self._threads = [threading.Thread(target=t, name="phalanx-adapter", daemon=True) for t in targets]
        for thread in self._threads:
            thread.start()

    def _send(self) -> None:
        while (item := self._outgoing.get()) is not None:
            dst, parts, operation = item
            try:
                for part in parts:
                    self._plain.send(part, dst)
            except Exception as error:
                operation.complete(_as_phalanx_error(error, dst))
            else:
                operation.complete()

    def _receive(self, peer: int) -> None:
        head = bytearray(LANE_ID_SIZE + HEADER_SIZE)
        while self._open_lanes:
            try:
                self._plain.recv(head, peer, timeout=LOOK_UP)
            except Timeout:
                continue
            except Exception as error:
                for mailbox in list(self._mailboxes.values()):
                    mailbox.gone(peer, _as_phalanx_error(error, peer))
                return
            header = parse_header(
                head[LANE_ID_SIZE:], max_message=self.options.max_message, max_object=self.options.max_object
            )
            body = memoryview(bytearray(header.description + header.payload))
            if body:
                self._plain.recv(body, peer)
            envelope = Envelope(peer, header.kind, header.tag, bytes(body[: header.description]), header.payload)
            self.mailbox(bytes(head[:LANE_ID_SIZE])).deliver(envelope, body[header.description :])


def _as_phalanx_error(error: Exception, peer: int) -> PhalanxError:
    return error if isinstance(error, PhalanxError) else PeerLost(peer, f"{type(error).__name__}: {error}")


class _AdaptedLane(Lane):
    """A lane whose mailbox speaks of the backend's ranks, and whose bytes are moved by the adapter's threads."""

    def __init__(
        self, adapter: AdaptedBackend, lane_id: bytes, rank: int, members: Sequence[int], mailbox: Mailbox
    ) -> None:
        super().__init__(rank, members, adapter.control)
        self.mailbox = mailbox
        self._adapter = adapter
        self._lane_id = lane_id
        self._closed = False

    def source_of(self, envelope: Envelope) -> int:
        return self.members.index(envelope.src)

    def mailbox_source(self, src: int) -> int:
        return self.members[src]

    def start_send(
        self, dst: int, kind: Kind, tag: int, description: bytes, payload: Sequence[Buffer], deadline: Deadline
    ) -> Operation:
        operation = Operation()
        if self.error is not None:
            operation.complete(self.error)
            return operation
        head = self._lane_id + pack_header(kind, tag, len(description), payload_size(payload))
        body = b"".join([description, *payload])
        self._adapter.send_soon(self.members[dst], [head, body] if body else [head], operation)
        return operation

    def inbound(self, src: int | None) -> Iterable[Inbound]:
        return ()

    def _end_channels(self, error: BaseException, goodbye: bool) -> None:
        if not self._closed and isinstance(error, ChannelClosed):
            self._closed = True
            self._adapter.lane_closed(self._lane_id)
