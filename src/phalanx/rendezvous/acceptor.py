"""Accepts connections and lets in only those that finish the handshake: bounded in time, bytes and number."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import OutOfResources, ProtocolError
from ..system_limits import out_of_resources
from ..transports.reactor import READ, WRITE, Reactor
from ..transports.stream import Stream, StreamEnded, TlsStream
from ..transports.tcp import server_stream
from ..types import Address
from ..wire.handshake import HandshakeStatus, Hello, ServerHandshake

if TYPE_CHECKING:
    from ..config.options import Options
    from ..wire.hosting import Settings

__all__ = ["Acceptor"]

logger = logging.getLogger("phalanx.rendezvous")

ACCEPT_BURST = 64
"""Connections taken in one turn, so that a flood cannot keep the thread from its other work."""

STUCK = 1.0
"""Seconds without a descriptor for a new connection after which it is a trouble: somebody may close a file soon."""

_REFUSALS = {
    HandshakeStatus.VERSION: "it speaks another version of the protocol",
    HandshakeStatus.AUTH_MODE: "one side uses a token and the other has auth='none'",
    HandshakeStatus.PROOF: "it does not know the job's token",
    HandshakeStatus.ROLE: "it wants what is not served here",
    HandshakeStatus.WORLD_SIZE: "it has another world size",
    HandshakeStatus.RANK: "there is no such rank",
    HandshakeStatus.TAKEN: "the rank is taken",
    HandshakeStatus.TARGET: "it looked for another rank or port",
    HandshakeStatus.CLOSED: "the world or group has ended",
    HandshakeStatus.BROKEN: "the group is broken",
    HandshakeStatus.CROSSED: "this rank opens the connection itself",
}
_USUAL = (HandshakeStatus.CLOSED, HandshakeStatus.BROKEN, HandshakeStatus.CROSSED)
"""Refusals that happen where all is well."""


class Acceptor:
    """A listening socket whose strangers are dropped, each with one log line.

    When too many handshakes are under way, the oldest is dropped, silent ones first: an honest one takes milliseconds,
    so under a flood it is a stranger's that goes. (Should it ever be an honest one's, that rank tries again.)

    Args:
        reactor: Whose thread serves the connections; all callbacks run there.
        listener: A listening socket, owned from now on.
        admit: Asked for a client that has proved itself; see `ServerHandshake`.
        welcome: Gets the stream of each client that was admitted.
    """

    def __init__(
        self,
        reactor: Reactor,
        listener: socket.socket,
        *,
        name: str,
        token: bytes | None,
        options: Options | Settings,
        admit: Callable[[Hello], HandshakeStatus],
        welcome: Callable[[Stream, Hello], None],
    ) -> None:
        self._reactor = reactor
        self._listener = listener
        self._name = name
        self._token = token
        self._options = options
        self._admit = admit
        self._welcome = welcome
        self._pending: dict[int, _Pending] = {}  # in the order in which they came
        self._closed = False
        self._stuck: OSError | None = None
        """Why the last try to accept a connection failed."""
        self._stuck_since = 0.0
        self.address = Address(*listener.getsockname()[:2])
        reactor.call_soon(self._start)
        reactor.call_soon(self._drop_slow)

    def _start(self) -> None:
        if not self._closed:
            self._reactor.watch(self._listener.fileno(), READ, self._accept)

    def close(self) -> None:
        """Stops listening and drops the handshakes under way. Called in the reactor's thread."""
        if self._closed:
            return
        self._closed = True
        self._reactor.forget(self._listener.fileno())
        self._listener.close()
        for pending in list(self._pending.values()):
            self._drop(pending, None)

    @property
    def trouble(self) -> OutOfResources | None:
        """The limit for whose sake no connection could be accepted for a while."""
        error = self._stuck
        if error is None or time.monotonic() - self._stuck_since < STUCK:
            return None
        return out_of_resources(error)

    def abandon(self) -> None:
        """In a forked child: closes the descriptors only."""
        with contextlib.suppress(OSError):
            self._listener.close()
        for pending in self._pending.values():
            pending.stream.abandon()

    def _accept(self, _events: int) -> None:
        for _ in range(ACCEPT_BURST):
            try:
                sock, peer = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:  # it went away while it was in the queue
                continue
            except OSError as error:
                # Out of descriptors, mostly. Pause instead of turning in a circle, and say it once.
                if self._stuck is None:
                    logger.warning("%s: cannot accept connections: %s", self._name, out_of_resources(error) or error)
                    self._stuck = error
                    self._stuck_since = time.monotonic()
                self._reactor.forget(self._listener.fileno())
                self._reactor.call_later(0.1, self._start)
                return
            self._stuck = None
            if len(self._pending) >= self._options.max_pending_handshakes:
                self._drop(self._least_promising(), "too many handshakes at once; it was the oldest")
            try:
                stream = server_stream(sock, self._options.tls)
            except OSError:  # it is gone already
                sock.close()
                continue
            machine = ServerHandshake(self._token, self._admit_here, stream.binding)
            pending = _Pending(stream, machine, Address(*peer[:2]), time.monotonic())
            self._pending[stream.fd] = pending
            self._advance(pending)

    def _least_promising(self) -> _Pending:
        """The oldest of those that have not even said who they are, else the oldest."""
        oldest = next(iter(self._pending.values()))
        return next((pending for pending in self._pending.values() if pending.machine.hello is None), oldest)

    def _admit_here(self, hello: Hello) -> HandshakeStatus:
        # A client that dialled another port was passed on by somebody who listens there.
        return self._admit(hello) if hello.port == self.address.port else HandshakeStatus.TARGET

    def _advance(self, pending: _Pending, _events: int = 0) -> None:
        try:
            if pending.advance():
                self._forget(pending)
                self._welcome(pending.stream, pending.hello)
                return
        except (StreamEnded, ProtocolError) as error:
            self._drop(pending, str(error))
            return
        if pending.refused is not None:
            # A rank that comes between two worlds tries again until there is one: nothing to worry anybody with.
            # So does one that has not heard yet that its group is broken; and two may open a connection to each other.
            early = pending.machine.refused in _USUAL
            self._drop(pending, pending.refused, level=logging.INFO if early else logging.WARNING)
            return
        wants_write = pending.outgoing or pending.stream.read_events == select.POLLOUT
        self._reactor.watch(
            pending.stream.fd, WRITE if wants_write else READ, lambda events: self._advance(pending, events)
        )

    def _drop_slow(self) -> None:
        if self._closed:
            return
        limit = time.monotonic() - self._options.handshake_timeout
        for pending in [p for p in self._pending.values() if p.since < limit]:
            self._drop(pending, f"no handshake within {self._options.handshake_timeout:g} s")
        self._reactor.call_later(min(1.0, self._options.handshake_timeout / 2), self._drop_slow)

    def _drop(self, pending: _Pending, reason: str | None, *, level: int = logging.WARNING) -> None:
        if reason is not None:
            logger.log(level, "%s: dropped a connection from %s: %s", self._name, pending.peer, reason)
        self._forget(pending)
        pending.stream.close()

    def _forget(self, pending: _Pending) -> None:
        self._reactor.forget(pending.stream.fd)
        self._pending.pop(pending.stream.fd, None)


class _Pending:
    """One handshake under way on the server's side."""

    def __init__(self, stream: Stream, machine: ServerHandshake, peer: Address, since: float) -> None:
        self.stream = stream
        self.machine = machine
        self.peer = peer  # the socket no longer knows it once the connection was reset
        self.since = since
        self.incoming = bytearray()
        self.outgoing = b""
        self._tls_done = not isinstance(stream, TlsStream)

    @property
    def hello(self) -> Hello:
        assert self.machine.hello is not None
        return self.machine.hello

    @property
    def refused(self) -> str | None:
        """Why the client was turned away, once it has been told."""
        if self.machine.refused is None or self.outgoing:
            return None
        who = f" (it says it is {self.machine.hello.who})" if self.machine.hello else ""
        return f"refused: {_REFUSALS[self.machine.refused]}{who}"

    def advance(self) -> bool:
        """Goes as far as it can without waiting; True once the client is in."""
        if not self._tls_done:
            assert isinstance(self.stream, TlsStream)
            if not self.stream.handshake():
                return False
            self._tls_done = True
        while True:
            if self.outgoing:
                self.outgoing = self.outgoing[self.stream.send([self.outgoing]) :]
                if self.outgoing:
                    return False
            if self.machine.done:
                return True
            if self.machine.refused is not None:
                return False
            chunk = bytearray(self.machine.wants - len(self.incoming))
            count = self.stream.receive_into(memoryview(chunk))
            if count == 0:
                return False
            self.incoming += chunk[:count]
            if len(self.incoming) == self.machine.wants:
                data, self.incoming = bytes(self.incoming), bytearray()
                self.outgoing = self.machine.feed(data)
