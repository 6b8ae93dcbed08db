"""A stream through two rings in shared memory, one for each direction, and the agreement on them.

The side that opened the connection makes a ring and offers it. The other side opens it, makes a ring of its own and
offers that. The first side opens this ring too and says whether it could; then both switch to their rings. This takes
three small messages on TCP, once per connection.

As with a single ring, the TCP connection stays. It is the sign of life, and a zero byte on it wakes a thread that
sleeps in `poll`. Only the reader takes such bytes away (`woken`): a writer that waits for room relies on the reader to
wake it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .ring import MadeRing, RingStream, make_ring, open_offer
from .stream import Buffer, Stream, StreamEnded

if TYPE_CHECKING:
    from .._core import RingIn, RingOut

__all__ = ["DuplexRing", "RingAgreement"]


class DuplexRing(RingStream):
    """Both directions of a link through shared memory. One thread may read while another writes.

    Args:
        stream: The TCP connection, taken over.
        pid: The process at the other end.
        aside: What was read from it after the agreement.
    """

    exact = False

    def __init__(self, stream: Stream, inbound: RingIn, outbound: RingOut, pid: int, aside: bytes = b"") -> None:
        super().__init__(stream, inbound, aside)
        self.inbound = inbound
        self.outbound = outbound
        self.pid = pid

    def receive_into(self, view: memoryview) -> int:
        raise NotImplementedError("frames are read by the core: see phalanx.rpc.pipe")

    def send(self, views: Sequence[Buffer]) -> int:
        raise NotImplementedError("frames are written by the core: see phalanx.rpc.pipe")

    def sever(self) -> None:
        self.outbound.sever()
        super().sever()

    def close(self) -> None:
        self.outbound.close()
        super().close()

    def abandon(self) -> None:
        self.outbound.abandon()
        super().abandon()


class RingAgreement:
    """One side's part in the agreement. No I/O: takes the words of the other side, and gives those for it.

    One thread agrees. Another may close the agreement meanwhile: what is made after that is given back at once.

    Args:
        stream: The connection.
        pid: The process at the other end.
    """

    def __init__(self, stream: Stream, pid: int) -> None:
        self._stream = stream
        self._pid = pid
        self._made: MadeRing | None = None
        self._outbound: RingOut | None = None
        self._inbound: RingIn | None = None
        self._closed = False
        self._changing = threading.Lock()

    @property
    def complete(self) -> bool:
        """True once there is a ring for each direction."""
        return self._inbound is not None and self._outbound is not None

    def offer(self) -> bytes:
        """The words that offer a ring of this side; none if it has no memory."""
        made = make_ring(self._stream)
        if made is None:
            return b""
        with self._changing:
            self._made, self._outbound = made, made.ring
        return b"" if self._is_over() else made.offer

    def accept(self, words: bytes) -> bool:
        """Opens the ring that the other side offers.

        Raises:
            ProtocolError: It is no offer of a ring.
        """
        inbound = open_offer(words, self._pid, self._stream) if words else None
        with self._changing:
            self._inbound = inbound
        return inbound is not None and not self._is_over()

    def stream(self, aside: bytes = b"") -> DuplexRing:
        """The stream that carries everything from now on, on both sides.

        Raises:
            StreamEnded: The agreement was closed meanwhile.
        """
        with self._changing:
            inbound, self._inbound = self._inbound, None
            outbound, self._outbound = self._outbound, None
        self.close()
        if inbound is None or outbound is None:
            raise StreamEnded("the link was closed before it used its rings")
        return DuplexRing(self._stream, inbound, outbound, self._pid, aside)

    def _is_over(self) -> bool:
        """Whether the agreement was closed; gives back what was made since."""
        if self._closed:
            self.close()
        return self._closed

    def close(self) -> None:
        """Gives back what is not in use. May be called twice, and by any thread."""
        with self._changing:
            self._closed = True
            halves = self._inbound, self._outbound
            self._inbound = self._outbound = None
            made, self._made = self._made, None
        for half in halves:
            if half is not None:
                half.abandon()
        if made is not None:
            made.close_memory()
