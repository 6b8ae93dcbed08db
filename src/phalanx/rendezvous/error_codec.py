"""Errors that travel: an exception as a `Cause` on the wire, and back with its type."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from ..errors import ChannelClosed, Desync, PeerLost, PhalanxError, Timeout
from ..exception_text import message_of, printable, type_name
from ..wire.control import Cause

__all__ = ["EndCause", "from_cause", "in_brief", "lost_peer", "to_cause"]

MAX_TEXT = 64 << 10
"""Characters of a message or traceback that travel; the end of a traceback says the most."""


BRIEF = 200
"""Characters of each text where there is little room: even if each takes four bytes, all fit."""
BRIEF_RANKS = 50


class EndCause(NamedTuple):
    """Why a world ended before its ranks did."""

    rank: int
    reason: str
    traceback: str = ""
    aborted: bool = False
    """True if the rank said so itself, False if it was lost without a word."""


def tail(text: str) -> str:
    """The last characters of a text that is too long."""
    return text if len(text) <= MAX_TEXT else "…" + text[-MAX_TEXT:]


def in_brief(cause: Cause) -> Cause:
    """The cause in words that fit the description of a frame (see `wire.frames.MAX_DESCRIPTION`)."""
    return msgspec.structs.replace(
        cause,
        message=printable(cause.message)[:BRIEF],
        traceback=printable(cause.traceback)[-BRIEF:],
        mine=printable(cause.mine)[:BRIEF],
        theirs=printable(cause.theirs)[:BRIEF],
        missing=cause.missing[:BRIEF_RANKS],
        arrived=cause.arrived[:BRIEF_RANKS],
    )


def lost_peer(error: BaseException | None) -> int | None:
    """The rank whose loss or leave an error, or what it was raised from, is about."""
    for _ in range(10):
        if isinstance(error, PeerLost):
            return error.peer
        if error is None:
            return None
        error = error.__cause__
    return None


def to_cause(error: BaseException) -> Cause:
    """The words of an error."""
    peer = getattr(error, "peer", None)
    peer = -1 if peer is None else peer
    if isinstance(error, PeerLost):
        return Cause(type(error).__name__, tail(error.reason), peer, tail(error.remote_traceback or ""))
    if isinstance(error, Desync):
        return Cause("Desync", tail(str(error)), peer, mine=error.mine, theirs=error.theirs)
    if isinstance(error, Timeout):
        missing, arrived = list(error.missing), list(error.arrived)
        return Cause("Timeout", tail(str(error)), peer, missing=missing, arrived=arrived, seconds=error.seconds)
    return Cause("PhalanxError", tail(f"{type_name(error)}: {message_of(error)}"), peer)


def from_cause(cause: Cause, reporter: int) -> PhalanxError:
    """The error that rank `reporter` had, for this rank to raise."""
    peer = None if cause.peer < 0 else cause.peer
    if cause.kind in ("PeerLost", "ChannelClosed"):
        kind = ChannelClosed if cause.kind == "ChannelClosed" else PeerLost
        lost = reporter if peer is None else peer
        by_itself = kind is ChannelClosed and lost == reporter
        return kind(
            lost, "it has closed this group" if by_itself else cause.message, remote_traceback=cause.traceback or None
        )
    if cause.kind == "Desync":
        return Desync(cause.message, mine=cause.mine, theirs=cause.theirs, peer=peer)
    if cause.kind == "Timeout":
        told_by_another = cause.message.startswith("on rank ")
        words = cause.message if told_by_another else f"on rank {reporter}: {cause.message}"
        return Timeout(words, missing=cause.missing, arrived=cause.arrived, seconds=cause.seconds, peer=peer)
    return PhalanxError(f"on rank {reporter}: {cause.message}", peer=reporter)
