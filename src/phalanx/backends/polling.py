"""Sleeping until a descriptor is ready."""

from __future__ import annotations

import select
from collections.abc import Iterable

from ..deadline import Deadline
from ..transports.waker import Waker

__all__ = ["sleep"]


def sleep(waker: Waker, polled: Iterable[tuple[int, int]], deadline: Deadline) -> None:
    """Sleeps until one of these descriptors has these events, the waker is set, or the deadline has come."""
    poller = select.poll()
    poller.register(waker.fd, select.POLLIN)
    events: dict[int, int] = {}
    for fd, wanted in polled:
        events[fd] = events.get(fd, 0) | wanted  # one descriptor may be both read and written
    for fd, wanted in events.items():
        if fd >= 0:
            poller.register(fd, wanted)
    poller.poll(deadline.poll_ms())
