"""The half of a server's link that its calls see: it slows callers down that do not read their answers."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Generic, TypeVar

from ..transports.lending import Lending
from ..transports.stream import Stream
from ..wire.codec import Limits
from .event_loop import EventLoop
from .link import LONGEST_HELD, MAX_QUEUED, CallLink
from .poller import LinkPoller
from .registry import Registry
from .workers import Task

__all__ = ["LONG", "ThrottledLink"]

LONG = 64 << 10
"""Bytes from which a waiting request is counted by its size; shorter ones are bounded by their number."""

Served = TypeVar("Served", bound=Task)


class ThrottledLink(CallLink, Generic[Served]):
    """Postpones calls while their caller does not read the answers to earlier ones."""

    def __init__(
        self,
        stream: Stream,
        peer: int,
        poller: LinkPoller,
        registry: Registry,
        loop: EventLoop,
        max_message: int,
        limits: Limits,
        *,
        spin: float,
        lending: Lending,
    ) -> None:
        super().__init__(stream, peer, max_message, limits, spin=spin, lending=lending)
        self.poller = poller
        self.registry = weakref.ref(registry)
        self.loop = loop
        self.served: dict[int, Served] = {}
        """The calls that are not answered yet, by number."""
        self.waiting_bytes = 0
        """Bytes of the long requests that have not begun."""
        self.closing = False
        self.longest_held = min(LONGEST_HELD, max_message)
        """Bytes of an answer that may wait for others."""
        self._counting = threading.Lock()
        self._postponed: deque[Task] = deque()

    def ask_poller(self) -> None:
        self.poller.watch(self)

    # -- when a call may begin -----------------------------------------------------------------------------------------

    def count_waiting(self, size: int) -> None:
        """Notes that a long request waits, or no longer does: then `size` is negative."""
        with self._counting:
            self.waiting_bytes += size

    def postpone(self, call: Task) -> bool:
        """Postpones a call until the caller reads its answers; False if the link has ended, so that it never will."""
        if self.ended is not None:
            return False
        with self._counting:
            self._postponed.append(call)
        if self.queued_bytes <= MAX_QUEUED or self.ended is not None:  # there is room by now
            self.on_room()
        return True

    def on_room(self) -> None:
        while self._postponed:
            with self._counting:
                if not self._postponed:
                    return
                call = self._postponed.popleft()
            self.poller.add(call)
