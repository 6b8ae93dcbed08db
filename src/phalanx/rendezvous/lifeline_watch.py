"""The directory's ends of the ranks' lifelines: tells which rank begins to die. See `lifeline` for what they are."""

from __future__ import annotations

import os
from collections.abc import Callable

from ..transports.reactor import READ, Reactor
from ..transports.stream import Stream

__all__ = ["LifelineWatch"]

LAST_WORDS_WAIT = 0.02
"""Seconds in which the last words of a rank may come after the end of its lifeline: they are on another connection."""


class LifelineWatch:
    """All lifelines that are held. Everything is called in the reactor's thread."""

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self._streams: set[Stream] = set()

    def add(self, stream: Stream, on_death: Callable[[], None]) -> None:
        """Watches a lifeline: calls back once its rank's process has begun to end, and has said nothing more."""
        self._streams.add(stream)

        def look(_events: int) -> None:
            try:
                # Past TLS: one byte is a goodbye, the end without it is a death, and nothing else ever comes.
                is_goodbye = os.read(stream.fd, 1) != b""
            except BlockingIOError:
                return
            except OSError:
                is_goodbye = False
            self._drop(stream)
            if not is_goodbye:
                self._reactor.call_later(LAST_WORDS_WAIT, on_death)

        self._reactor.watch(stream.fd, READ, look)

    def close(self) -> None:
        """Gives all of them up."""
        for stream in list(self._streams):
            self._drop(stream)

    def abandon(self) -> None:
        """In a forked child: closes the descriptors only."""
        for stream in self._streams:
            stream.abandon()

    def _drop(self, stream: Stream) -> None:
        self._streams.discard(stream)
        self._reactor.forget(stream.fd)
        stream.close()
