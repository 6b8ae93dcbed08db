"""Messages that the core has begun and not ended: the rest of them."""

from __future__ import annotations

from typing import Any

from ..group import Group, Work
from ..group.tracking import call_site
from ..transports.ring_channel import last_handed_over

__all__ = ["go_on", "rest_of"]


def rest_of(message: Any, answer: Any) -> Work[Any]:
    """Goes on with a message that the fast path has given up, with a part of it on its way, or nothing.

    Args:
        message: The core's `PreparedMessage`.
        answer: What `FastMessages` says of it.
    """
    group, peer, operation = message.group, message.peer, answer[0] if answer else None
    call_site.lend(message.site)
    try:
        if operation is not None:
            return go_on(group, operation, f"send(dst={peer})" if message.sends else f"recv(src={peer})", peer, None)
        begin = group.isend if message.sends else group.irecv
        work: Work[Any] = begin(message.memory, peer, tag=message.tag)
        return work
    finally:
        call_site.lend(None)


def go_on(group: Group, operation: Any, what: str, peer: int, seconds: float | None) -> Work[Any]:
    """A part of the message is through, and the rest takes a while: it goes on by itself."""
    last_handed_over()
    entry = group._journal.begin(what, peer, posted=True)
    return group._in_background(entry, operation, group._deadline(seconds), [peer], lambda: None)
