"""One connection for both directions between two ranks: a half for the channel that reads, one for that which writes.

What a rank sends then acknowledges what it has received, which would otherwise take a packet of its own: over loopback
a third of the time of a short exchange. Each half is closed by its channel, and the other side sees of that what it
would see if the channel had a connection of its own; the connection is given back once both are, and what was sent is
delivered.
"""

from __future__ import annotations

import contextlib
import os
import socket

from .lingering import Lingering, drop_what_came, is_delivered
from .stream import Stream

__all__ = ["ReadingHalf", "WritingHalf", "two_way"]


def two_way(stream: Stream, lingering: Lingering) -> tuple[ReadingHalf, WritingHalf]:
    """The halves of a plain stream, which is theirs from now on.

    Args:
        lingering: Keeps the connection once both are closed, as long as something is to be delivered.
    """
    both = _Both(stream, lingering)
    return ReadingHalf(both), WritingHalf(both)


class _Both:
    """The connection of two halves. May be told twice of each end: an interrupt may have cut the first time short."""

    def __init__(self, stream: Stream, lingering: Lingering) -> None:
        self.stream = stream
        self.socket = stream._socket
        self.reads = self.writes = True
        self._lingering = lingering

    def settle(self) -> None:
        if not (self.reads or self.writes):
            self._part()
            return
        with contextlib.suppress(OSError):
            if not self.writes:
                self.socket.shutdown(socket.SHUT_WR)
            elif not self._other_side_is_done():
                self._reset()

    def _part(self) -> None:
        """Gives the connection back, once all that was sent is delivered."""
        if self.socket in self._lingering:
            self._lingering.keep(self.socket)  # once more: an interrupt may have cut the first time short
            return
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
        # With anything left that came, the kernel would reset the connection as it is closed.
        if drop_what_came(self.socket) or is_delivered(self.socket):
            self.socket.close()
        else:
            self._lingering.keep(self.socket)

    def _other_side_is_done(self) -> bool:
        try:
            return self.socket.recv(1, socket.MSG_PEEK) == b""
        except (BlockingIOError, InterruptedError):
            return False

    def _reset(self) -> None:
        """Breaks the connection, so that the other side does not go on writing to nobody. The descriptor stays."""
        self.socket.shutdown(socket.SHUT_RDWR)  # wakes whoever waits for it
        with socket.socket(self.socket.family) as dead:
            os.dup2(dead.fileno(), self.socket.fileno(), inheritable=False)


class _Half(Stream):
    """Half of a connection."""

    def __init__(self, both: _Both) -> None:
        super().__init__(both.socket)
        self._both = both


class ReadingHalf(_Half):
    """The half of the channel that reads."""

    def say(self, word: bytes) -> None:
        """Says it only if nobody writes: the channel that does has its own last words."""
        if self._both.writes:
            super().say(word)

    def close(self) -> None:
        self._both.reads = False
        self._both.settle()


class WritingHalf(_Half):
    """The half of the channel that writes, or will."""

    def close(self) -> None:
        self._both.writes = False
        self._both.settle()
