"""Errors on their way to other ranks: an exception as an `EncodedError`, and back with its type."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from ..errors import ChannelClosed, Desync, PeerLost, PhalanxError, Timeout
from ..exception_text import message_of, printable, type_name
from ..wire.control import EncodedError

__all__ = ["EndCause", "decode_error", "encode_error", "lost_peer", "shorten_error"]

MAX_TEXT = 64 << 10
"""Characters of a message or traceback that are sent; of a longer one the end is kept, which says the most."""
SHORT_TEXT = 200
"""Characters of each text in a short error: all of them fit a frame, even at four bytes for a character."""
SHORT_RANKS = 50
"""Ranks in each list of a short error."""


class EndCause(NamedTuple):
    """Why a world ended before its ranks did."""

    rank: int
    reason: str
    traceback: str = ""
    aborted: bool = False
    """True if the rank itself ended the world, False if it was lost."""


def keep_end(text: str) -> str:
    """The text, or its last `MAX_TEXT` characters if it is longer."""
    return text if len(text) <= MAX_TEXT else "…" + text[-MAX_TEXT:]


def shorten_error(encoded: EncodedError) -> EncodedError:
    """The same error, short enough for the description of a frame (`wire.frames.MAX_DESCRIPTION`)."""
    return msgspec.structs.replace(
        encoded,
        message=printable(encoded.message)[:SHORT_TEXT],
        traceback=printable(encoded.traceback)[-SHORT_TEXT:],
        mine=printable(encoded.mine)[:SHORT_TEXT],
        theirs=printable(encoded.theirs)[:SHORT_TEXT],
        missing=encoded.missing[:SHORT_RANKS],
        arrived=encoded.arrived[:SHORT_RANKS],
    )


def lost_peer(error: BaseException | None) -> int | None:
    """The rank whose loss (or leaving) an error reports, or one of the errors that it was raised from."""
    for _ in range(10):
        if isinstance(error, PeerLost):
            return error.peer
        if error is None:
            return None
        error = getattr(error, "phalanx_error", None) or error.__cause__  # the first for an error of torch's types
    return None


def encode_error(error: BaseException) -> EncodedError:
    """The error as data that can be sent."""
    peer = getattr(error, "peer", None)
    peer = -1 if peer is None else peer
    if isinstance(error, PeerLost):
        return EncodedError(type(error).__name__, keep_end(error.reason), peer, keep_end(error.remote_traceback or ""))
    if isinstance(error, Desync):
        return EncodedError("Desync", keep_end(str(error)), peer, mine=error.mine, theirs=error.theirs)
    if isinstance(error, Timeout):
        missing, arrived = list(error.missing), list(error.arrived)
        return EncodedError(
            "Timeout", keep_end(str(error)), peer, missing=missing, arrived=arrived, seconds=error.seconds
        )
    return EncodedError("PhalanxError", keep_end(f"{type_name(error)}: {message_of(error)}"), peer)


def decode_error(encoded: EncodedError, reporter: int) -> PhalanxError:
    """The error of rank `reporter`, for this rank to raise."""
    peer = None if encoded.peer < 0 else encoded.peer
    if encoded.kind in ("PeerLost", "ChannelClosed"):
        kind = ChannelClosed if encoded.kind == "ChannelClosed" else PeerLost
        lost = reporter if peer is None else peer
        by_itself = kind is ChannelClosed and lost == reporter
        return kind(
            lost,
            "it has closed this group" if by_itself else encoded.message,
            remote_traceback=encoded.traceback or None,
        )
    if encoded.kind == "Desync":
        return Desync(encoded.message, mine=encoded.mine, theirs=encoded.theirs, peer=peer)
    if encoded.kind == "Timeout":
        told_by_another = encoded.message.startswith("on rank ")
        words = encoded.message if told_by_another else f"on rank {reporter}: {encoded.message}"
        return Timeout(words, missing=encoded.missing, arrived=encoded.arrived, seconds=encoded.seconds, peer=peer)
    return PhalanxError(f"on rank {reporter}: {encoded.message}", peer=reporter)
