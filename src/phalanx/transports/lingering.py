"""Connections that are closed on this side, but still have to deliver what was sent on them.

`send` returns once the kernel has the bytes, and the other rank may read them much later. A connection for both
directions cannot simply be closed then: whatever the other rank writes on it meanwhile, the kernel answers with a
reset, and throws away what it has not delivered. So the descriptor is kept until everything is delivered, and what
comes until then is read and dropped.
"""

from __future__ import annotations

import functools
import socket
import threading

from ..one_event import OneEvent
from ..operating_system import undelivered
from .reactor import READ, Reactor

__all__ = ["Lingering", "drop_what_came", "is_delivered"]

DROPPED = 64 << 10
"""Bytes that are read and dropped at a time."""
MOST_AT_ONCE = 16 << 20
"""Bytes after which others have their turn."""
MOST = 64
"""Connections that may be kept at a time; with more, the oldest is closed."""
LOOK = 0.02
"""Seconds between two looks whether all is delivered: nothing tells of that."""
UNKNOWN_FOR = 1.0
"""Seconds for which a connection is kept where the system does not tell what is delivered."""
SEGMENT = 64 << 10
"""Bytes that are delivered on this host although nobody has said so: a short segment is acknowledged later."""


def drop_what_came(connection: socket.socket) -> bool:
    """Reads what is there and drops it. True if nothing will come any more, because the other side has closed."""
    dropped = 0
    try:
        while dropped < MOST_AT_ONCE:
            found = len(connection.recv(DROPPED))
            if not found:
                return True
            dropped += found
    except (BlockingIOError, InterruptedError):
        return False
    except OSError:
        return True
    return False


def is_delivered(connection: socket.socket) -> bool:
    """Whether the other side's kernel has all that was sent, so that a reset cannot take it away."""
    left = undelivered(connection)
    if left is None:
        return False
    unsent, unacknowledged = left
    return not unsent and unacknowledged <= (SEGMENT if _stays_on_host(connection) else 1)  # the end counts as a byte


def _stays_on_host(connection: socket.socket) -> bool:
    try:
        return bool(connection.getsockname()[0] == connection.getpeername()[0])
    except OSError:
        return True


class Lingering:
    """Keeps such connections, which it owns from then on, in the thread of a reactor."""

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self._lock = threading.RLock()  # a signal handler may close a group in the middle of another's end
        self._kept: dict[socket.socket, float] = {}
        """Each with the seconds for which it has been kept."""
        self._is_looking = False
        self._idle: list[OneEvent] = []

    def __contains__(self, connection: socket.socket) -> bool:
        return connection in self._kept

    def keep(self, connection: socket.socket) -> None:
        """Takes a connection whose own direction is shut. From any thread; may be told of one twice."""
        with self._lock:
            self._kept.setdefault(connection, 0.0)
        if not self._reactor.call_soon(functools.partial(self._begin, connection)):
            self._give_back(connection)

    def finish(self, seconds: float) -> None:
        """Waits until all is delivered, for so long at most."""
        idle = OneEvent()
        with self._lock:
            if not self._kept:
                return
            self._idle.append(idle)
        idle.wait(seconds)

    def close(self) -> None:
        """Closes all that are left. To be called once the reactor has ended."""
        for connection in list(self._kept):
            self._give_back(connection)

    def abandon(self) -> None:
        """In a forked child: closes the descriptors only."""
        for connection in self._kept:
            connection.close()
        self._kept = {}

    # -- in the reactor's thread ---------------------------------------------------------------------------------------

    def _begin(self, connection: socket.socket) -> None:
        if connection.fileno() < 0:  # it was done before this rank was told of it again
            self._give_back(connection)
            return
        self._reactor.watch(connection.fileno(), READ, functools.partial(self._on_readable, connection))
        if len(self._kept) > MOST:
            self._end(next(iter(self._kept)))
        if not self._is_looking:
            self._is_looking = True
            self._reactor.call_later(LOOK, self._look)

    def _on_readable(self, connection: socket.socket, _events: int) -> None:
        if drop_what_came(connection):
            self._end(connection)

    def _look(self) -> None:
        for connection in list(self._kept):
            self._kept[connection] += LOOK
            is_unknown = undelivered(connection) is None and self._kept[connection] >= UNKNOWN_FOR
            if is_unknown or is_delivered(connection):
                self._end(connection)
        self._is_looking = bool(self._kept)
        if self._is_looking:
            self._reactor.call_later(LOOK, self._look)

    def _end(self, connection: socket.socket) -> None:
        self._reactor.forget(connection.fileno())
        self._give_back(connection)

    def _give_back(self, connection: socket.socket) -> None:
        connection.close()
        with self._lock:
            self._kept.pop(connection, None)
            told = [] if self._kept else self._idle
            self._idle = self._idle if self._kept else []
        for event in told:
            event.set()
