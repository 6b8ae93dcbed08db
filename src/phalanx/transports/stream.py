"""A connected, non-blocking byte stream: plain TCP or TLS. The only place that sees errors of the operating system.

`receive_into` and `send` never wait. What they could not do now returns 0, and the caller polls for `read_events` or
`write_events`. An end of any kind raises `StreamEnded` with the reason in words.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..deadline import Deadline
from ..errors import Timeout
from ..operating_system import keepalive_options, link_numbers

if TYPE_CHECKING:
    import ssl

__all__ = [
    "IOV_MAX",
    "ConnectionRefused",
    "LinkState",
    "Stream",
    "StreamEnded",
    "TlsStream",
    "ended_with",
    "read_exactly",
    "write_all",
]

Buffer = bytes | bytearray | memoryview
IOV_MAX = 64
"""Buffers handed to the kernel in one call; Linux takes 1024, but then each of many calls would list them all again."""
TLS_PIECE = 256 << 10
"""Bytes handed to OpenSSL in one call. Of a write that does not go through as a whole it reports no progress at all."""
CACHED = 256 << 10
"""Bytes under way between two processes of one host: so few are still in the cache when they are received."""


class LinkState(NamedTuple):
    """The kernel's measurements of a connection."""

    sent: int
    """Bytes that the other side has acknowledged."""
    received: int
    busy_us: int
    """Time with data on its way to the other side."""
    held_us: int
    """The part of it in which the other side did not read."""
    round_trip_us: int
    lost: int
    """Packets that were sent again."""
    segments: int
    """Packets with data that were sent."""
    longest_segment: int
    """Bytes that one of them can have."""


class StreamEnded(ConnectionError):
    """The stream is over. `clean` tells an orderly end from a broken connection."""

    def __init__(self, reason: str, *, clean: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.clean = clean


class ConnectionRefused(StreamEnded):
    """No process listens at that address."""


def _ended(error: OSError) -> StreamEnded:
    name = errno.errorcode.get(error.errno or 0, "")
    words = {
        "ECONNRESET": "the connection was reset",
        "EPIPE": "the connection was closed",
        "ETIMEDOUT": "the machine stopped answering",
        "EHOSTUNREACH": "the machine cannot be reached",
        "ENETUNREACH": "the network cannot be reached",
        "EBADF": "the connection was closed on this side",
    }
    return StreamEnded(words.get(name, str(error)))


def ended_with(code: int) -> StreamEnded:
    """The end of a stream as an error number tells it; 0 is an orderly end."""
    if code:
        return _ended(OSError(code, os.strerror(code)))
    return StreamEnded("the connection was closed by the other side", clean=True)


class Stream:
    """A plain TCP (or Unix) stream. Owns its socket.

    One thread may send while another receives; two senders or two receivers must take turns.
    """

    read_events = select.POLLIN
    write_events = select.POLLOUT
    binding = b""
    """Bytes that both sides know of this connection, and no one in between can show: the certificate, under TLS."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self.fd = sock.fileno()

    plain = True
    """True if the bytes of the program are those of the connection: the core may move them by its descriptor."""
    must_repeat = False
    """True if a write that did not go through must be repeated unchanged, because a part may be on its way."""
    exact = False
    """True if no more is to be read than is needed now: where reading is cheap, the rest is better left in place."""

    @property
    def pending(self) -> bool:
        """True if bytes wait inside the stream itself, where polling does not see them."""
        return False

    @property
    def peer(self) -> str:
        """The other side's address, for logs."""
        try:
            host, port = self._socket.getpeername()[:2]
        except (OSError, ValueError):
            return "a closed connection"
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def peer_host(self) -> str:
        """The other side's address without the port."""
        return str(self._socket.getpeername()[0])

    @property
    def link_state(self) -> LinkState | None:
        """The state of the connection; None where the system does not tell it."""
        if self._socket.family == socket.AF_UNIX:
            return None
        found = link_numbers(self._socket)
        return None if found is None else LinkState(*found)

    def receive_into(self, view: memoryview) -> int:
        """Fills as much of `view` as there is now; 0 if there is nothing yet.

        Raises:
            StreamEnded: The other side closed, or the connection broke.
        """
        try:
            count = self._socket.recv_into(view)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise _ended(error) from None
        if count == 0 and len(view):
            raise StreamEnded("the connection was closed by the other side", clean=True)
        return count

    def receive_parts(self, views: Sequence[memoryview]) -> int:
        """Fills `views` (at most `IOV_MAX` of them) one after another, as `receive_into` fills one.

        Raises:
            StreamEnded: The other side closed, or the connection broke.
        """
        try:
            count = self._socket.recvmsg_into(views)[0]
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise _ended(error) from None
        if count == 0:
            raise StreamEnded("the connection was closed by the other side", clean=True)
        return count

    def send(self, views: Sequence[Buffer]) -> int:
        """Sends as many bytes of `views` (at most `IOV_MAX` of them) as fit now; 0 if none do.

        Raises:
            StreamEnded: The connection broke.
        """
        try:
            return self._socket.sendmsg(views)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise _ended(error) from None

    def woken(self) -> None:
        """Called when `poll` has found something. A stream whose bytes come another way drops the byte that woke it."""

    def may_sleep(self) -> bool:
        """True if polling will see everything that comes from now on. If False, there is something to read now."""
        return not self.pending

    def say(self, word: bytes) -> None:
        """Sends last words; nothing follows. They are lost if there is no room for them.

        Raises:
            StreamEnded: The connection broke.
        """
        self.send([word])

    def watch_host(self, seconds: float) -> None:
        """Ends the stream when the other machine (not process) has acknowledged nothing for so long.

        A stopped or busy process does not count: its kernel still answers.
        """
        for level, option, value in keepalive_options(seconds):
            self._socket.setsockopt(level, option, value)

    def keep_in_cache(self) -> None:
        """Lets only so many bytes be under way as stay in the cache; for two processes of one host, a core for each.

        Where they share a core, more bytes in one go are better, and between hosts the kernel knows best.
        """
        if self._socket.family not in (socket.AF_INET, socket.AF_INET6):
            return
        with contextlib.suppress(OSError):
            if self._socket.getsockname()[0] == self._socket.getpeername()[0]:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, CACHED)

    def finish_sending(self) -> None:
        """Tells the other side that nothing more will come."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def sever(self) -> None:
        """Breaks the connection in both directions, as a network that fails does: for `phalanx.testing.faults`.

        The descriptor stays, because other threads may wait on it.
        """
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # not TLS's own, which would go on in the clear

    def close(self) -> None:
        """Gives the socket back. May be called twice."""
        self._socket.close()

    def copy(self) -> Stream:
        """The same connection with a descriptor of its own, which stays when this one is closed. Not inside TLS."""
        return Stream(self._socket.dup())

    def abandon(self) -> None:
        """Closes the descriptor in a forked child without a word to the other side, which still talks to the parent."""
        fd = self._socket.detach()
        if fd >= 0:
            os.close(fd)


class TlsStream(Stream):
    """A stream inside TLS. OpenSSL's connection is not made for two threads at once, so each call takes a lock."""

    plain = False
    must_repeat = True

    def __init__(self, sock: ssl.SSLSocket) -> None:
        import ssl

        super().__init__(sock)
        self._tls = sock
        self._lock = threading.RLock()  # re-entrant: a signal handler may come between two calls of OpenSSL, and send
        self._want_read = ssl.SSLWantReadError
        self._want_write = ssl.SSLWantWriteError
        self._error = ssl.SSLError
        self._eof = (ssl.SSLEOFError, ssl.SSLZeroReturnError)

    @property
    def pending(self) -> bool:
        with self._lock:
            try:
                return self._tls.pending() > 0
            except (OSError, ValueError):  # it is closed
                return False

    def handshake(self) -> bool:
        """Goes on with the TLS handshake; True once it is complete.

        Raises:
            StreamEnded: The other side speaks no TLS, or its certificate is not accepted.
        """
        try:
            self._tls.do_handshake()
        except self._want_read:
            self.read_events = select.POLLIN
            return False
        except self._want_write:
            self.read_events = select.POLLOUT
            return False
        except OSError as error:
            raise StreamEnded(f"TLS: {getattr(error, 'reason', None) or error}") from None
        self.read_events = select.POLLIN
        return True

    def receive_parts(self, views: Sequence[memoryview]) -> int:
        return self.receive_into(views[0])

    def receive_into(self, view: memoryview) -> int:
        if not len(view):
            return 0
        with self._lock:
            try:
                count = self._tls.recv_into(view[:TLS_PIECE])
            except self._want_read:
                self.read_events = select.POLLIN
                return 0
            except self._want_write:
                self.read_events = select.POLLOUT
                return 0
            except self._eof:
                count = 0
            except self._error as error:
                raise StreamEnded(f"TLS: {error.reason or error}") from None
            except OSError as error:
                raise _ended(error) from None
        if count == 0:
            raise StreamEnded("the connection was closed by the other side", clean=True)
        return count

    def send(self, views: Sequence[Buffer]) -> int:
        total = 0
        with self._lock:
            self.write_events = select.POLLOUT
            for view in views:
                if not len(view):
                    continue
                try:
                    count = self._tls.send(view[:TLS_PIECE])
                except self._want_read:
                    self.write_events = select.POLLIN
                    return total
                except self._want_write:
                    return total
                except self._error as error:
                    raise StreamEnded(f"TLS: {error.reason or error}") from None
                except OSError as error:
                    raise _ended(error) from None
                total += count
                if count < len(view):
                    break
        return total


# -- waiting in the caller's thread, for handshakes --------------------------------------------------------------------

CHECK_EVERY = 0.1
"""Seconds between looks at whether the wait still makes sense."""


def no_check() -> None:
    """The check of a wait that only its deadline ends."""


def wait_ready(fd: int, events: int, deadline: Deadline, check: Callable[[], None]) -> bool:
    """Waits until a descriptor is ready for `events`; False if the deadline came first. `check` may raise to end it."""
    poller = select.poll()
    poller.register(fd, events)
    while not poller.poll(deadline.sooner(CHECK_EVERY).poll_ms()):
        check()
        if deadline.expired:
            return False
    return True


def _wait(fd: int, events: int, deadline: Deadline, what: str, check: Callable[[], None]) -> None:
    if not wait_ready(fd, events, deadline, check):
        raise Timeout(f"{what}: no answer within {deadline.seconds:.3g} s", seconds=deadline.seconds)


def read_exactly(
    stream: Stream, size: int, deadline: Deadline, what: str, check: Callable[[], None] = no_check
) -> bytes:
    """Reads exactly `size` bytes. `check` is called while it waits and may raise to end it.

    Raises:
        StreamEnded: The stream ended before.
        Timeout: The deadline passed before.
    """
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = stream.receive_into(view)
        view = view[count:]
        if not count:
            _wait(stream.fd, stream.read_events, deadline, what, check)
    return bytes(data)


def write_all(stream: Stream, data: bytes, deadline: Deadline, what: str, check: Callable[[], None] = no_check) -> None:
    """Writes all of `data`. `check` is called while it waits and may raise to end it.

    Raises:
        StreamEnded: The connection broke.
        Timeout: The deadline passed before.
    """
    view = memoryview(data)
    while view:
        count = stream.send([view])
        view = view[count:]
        if not count:
            _wait(stream.fd, stream.write_events, deadline, what, check)
