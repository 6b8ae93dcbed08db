"""A control connection as the reactor sees it: messages in, messages out, and one end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from ..errors import ProtocolError
from ..transports.reactor import READ, WRITE, Reactor
from ..transports.stream import Stream, StreamEnded
from ..wire.control import ControlReader, MessageReader, pack

__all__ = ["ControlLink"]

logger = logging.getLogger("phalanx.rendezvous")

READ_SIZE = 64 << 10
MAX_OUTGOING = 32 << 20
"""Bytes that may wait for a side that does not read; one that is stopped for hours gets heartbeats of a few bytes."""


class ControlLink:
    """Owns the stream of a control connection. Everything runs in the reactor's thread.

    Args:
        on_message: Called for each message.
        on_end: Called once with the reason, unless `close` was called before.
        reader: Knows the messages that may come; those of control connections if it is not given.
    """

    def __init__(
        self,
        reactor: Reactor,
        stream: Stream,
        on_message: Callable[[Any], None],
        on_end: Callable[[str], None],
        reader: MessageReader[Any] | None = None,
    ) -> None:
        self.stream = stream
        self._reactor = reactor
        self._reader = reader or ControlReader()
        self._outgoing = bytearray()
        self._buffer = bytearray(READ_SIZE)
        self._on_message = on_message
        self._on_end = on_end
        self._reading = False
        self._broken = False
        """True once a write has failed; the end follows in the reactor's next turn."""
        self.closed = False

    def start(self) -> None:
        """Begins to serve the connection."""
        self._reactor.watch(self.stream.fd, READ, self._ready)
        self._ready(READ)

    def send(self, message: msgspec.Struct) -> None:
        """Sends now what fits, and the rest when it can."""
        if self.closed or self._broken:
            return
        self._outgoing += pack(message)
        if len(self._outgoing) > MAX_OUTGOING:
            self._break(f"it does not read: {len(self._outgoing)} bytes wait to be sent to it")
        else:
            self._flush()

    @property
    def waiting(self) -> int:
        """Bytes that the other side has not taken yet."""
        return len(self._outgoing)

    def close(self) -> None:
        """Closes the connection; what was sent and fits the kernel's buffer still arrives."""
        if not self.closed:
            self.closed = True
            self._reactor.forget(self.stream.fd)
            self.stream.finish_sending()
            self.stream.close()

    def _end(self, reason: str) -> None:
        if not self.closed:
            self.closed = True
            self._reactor.forget(self.stream.fd)
            self.stream.close()
            self._on_end(reason)

    def _ready(self, events: int) -> None:
        if events & WRITE:
            self._flush()
        if self._reading:
            return
        self._reading = True
        view = memoryview(self._buffer)
        try:
            while not self.closed:
                count = self.stream.receive_into(view)
                if not count:
                    return
                for message in self._reader.feed(view[:count]):
                    self._hear(message)
                    if self.closed:
                        return
        except StreamEnded as error:
            self._end(error.reason)
        except ProtocolError as error:
            self._end(str(error))
        finally:
            self._reading = False

    def _hear(self, message: Any) -> None:
        try:
            self._on_message(message)
        except (StreamEnded, ProtocolError):
            raise
        except Exception:  # those that came with it must still be heard
            logger.exception("an unexpected error at a message of %s", type(message).__name__)

    def _flush(self) -> None:
        if self.closed:
            return
        try:
            while self._outgoing:
                count = self.stream.send([bytes(self._outgoing[:READ_SIZE])])
                if not count:
                    break
                del self._outgoing[:count]
        except StreamEnded as error:
            self._break(error.reason)
            return
        self._reactor.watch(self.stream.fd, READ | WRITE if self._outgoing else READ, self._ready)

    def _break(self, reason: str) -> None:
        """Ends the connection in the reactor's next turn.

        Not at once: the end of one is told to all others. Where hundreds have gone together, each such word would find
        the next end, one call inside the other.
        """
        self._broken = True
        self._outgoing.clear()

        def end() -> None:
            # The other side may have said goodbye before it closed: read its last words before judging its silence.
            self._ready(READ)
            self._end(reason)

        self._reactor.call_soon(end)
