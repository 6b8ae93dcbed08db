"""The answering half of a server's link: sends the answers of served calls, and slows callers down that do not read."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any, Generic, TypeVar

from ..errors import PhalanxError, UsageError
from ..transports.stream import Stream
from ..wire.calls import CallKind
from ..wire.codec import Limits
from .event_loop import EventLoop
from .link import MAX_QUEUED, CallLink
from .payload import encode_error, encode_value
from .poller import LinkPoller
from .registry import Registry
from .workers import Task

__all__ = ["LONG", "AnsweringLink"]

LONG = 64 << 10
"""Bytes from which a waiting request is counted by its size; shorter ones are bounded by their number."""

Served = TypeVar("Served", bound=Task)


class AnsweringLink(CallLink, Generic[Served]):
    """Sends answers, and postpones calls while their caller does not read the answers to earlier ones."""

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
    ) -> None:
        super().__init__(stream, peer, max_message, limits, spin=spin)
        self.poller = poller
        self.registry = weakref.ref(registry)
        self.loop = loop
        self.served: dict[int, Served] = {}
        """The calls that are not answered yet, by number."""
        self.waiting_bytes = 0
        """Bytes of the long requests that have not begun."""
        self.closing = False
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

    # -- answers -------------------------------------------------------------------------------------------------------

    def answer(self, kind: int, call: int, value: Any = None) -> None:
        """Sends a result or an item.

        Raises:
            UsageError: The value cannot be sent.
        """
        head, buffers, payload = encode_value(value, self.limits)
        if payload + len(head) > self._max_message:
            size = payload + len(head)
            raise UsageError(f"a result of {size} bytes is too large (max_message is {self._max_message})")
        try:
            sent = self.send(kind, call, head, buffers, payload)
        except PhalanxError:
            return  # the caller is gone
        if not sent:
            self.ask_poller()

    def answer_error(self, call: int, kind: str, type_name: str, message: str, trace: str = "") -> None:
        """Sends an error."""
        try:
            sent = self.send(CallKind.ERROR, call, encode_error(kind, type_name, message, trace))
        except PhalanxError:
            return
        if not sent:
            self.ask_poller()
