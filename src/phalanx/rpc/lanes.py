"""Lanes: further connections between two ranks, over which long arguments and results go at the same time.

One TCP connection keeps one core busy on each side, and much of that time the two wait for each other. So the first
long payload has the caller offer lanes. The caller opens each as it has opened the link, with the same handshake, and
joins it to the link by a secret that went over the link itself. No call waits for that: until all lanes are there,
payloads go over the link. If they never come, it stays so.

```
caller  link    LANES  call 0  [secret, how many]
server  link    LANES  call 0  how many are to come; 0: none
caller  lane i  LANES  call i  secret                        i = 1, 2, ...
server  link    LANES  call 1                                all have come: both sides may use them
```

The payload is cut as cpp/phalanx/lanes.hpp says. If a lane breaks, so does the link: a part of a payload may be lost.
There are none inside TLS, beside shared memory, nor without the core.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec

from .._native import core
from ..background_thread import BackgroundThread
from ..deadline import Deadline
from ..errors import ChannelClosed, PhalanxError, ProtocolError
from ..operating_system import usable_cores
from ..transports.stream import Stream, StreamEnded, write_all
from ..wire.calls import CallKind, pack_header
from ..wire.packing import pack
from .pipe import Pipe

__all__ = ["LANES_FROM", "CallerLanes", "ServerLanes", "lanes_with"]

LANES_FROM = 2 << 20
"""Bytes of a payload from which several connections gain more than it takes to wake a thread for each."""
MOST_LANES = 4
SPARE = 16
"""Descriptors that the program may need meanwhile."""
OPEN_WITHIN = 30.0
"""Seconds that the caller tries to open them."""

_SECRET = 16
_offer = msgspec.msgpack.Decoder(tuple[bytes, int]).decode
_number = msgspec.msgpack.Decoder(int).decode


def lanes_with(spare_cores: int, oversubscribed: bool) -> int:
    """How many lanes a link of this rank has, if the rank has so many cores to spare; 0: none.

    Two are worth it even without a core to spare: the thread of a lane runs while the other side waits.
    """
    if core is None or oversubscribed or usable_cores() < 2:
        return 0
    return min(max(spare_cores + 1, 2), MOST_LANES)


class LanedLink(Protocol):
    """A link, as far as its lanes need it."""

    peer: int
    pipe: Pipe
    ended: PhalanxError | None
    lanes: CallerLanes | ServerLanes | None

    @property
    def stream(self) -> Stream:
        """The connection."""

    def send(self, kind: int, call: int, head: bytes) -> Any:
        """Sends a frame."""

    def give_stream_away(self) -> None:
        """Ends the link, but not the connection."""

    def end(self, error: Exception) -> None:
        """Ends the link and the connection."""


class CallerLanes:
    """The side that offers and opens lanes.

    Args:
        most: How many it offers.
        dial: Opens a connection to the other rank.
    """

    def __init__(self, link: LanedLink, most: int, dial: Callable[[Deadline], Stream]) -> None:
        self._link = link
        self._most = most
        self._dial = dial
        self._secret = secrets.token_bytes(_SECRET)
        self._offered = self._answered = False

    def want(self) -> None:
        """A long payload goes or comes: offers lanes, once."""
        if self._offered:
            return
        self._offered = True
        with contextlib.suppress(PhalanxError):  # the payload itself will tell
            self._link.send(CallKind.LANES, 0, pack((self._secret, self._most)))

    def handle(self, call: int, head: bytes) -> None:
        """Handles what the other side says of lanes. Called by the mover."""
        native = self._link.pipe.native
        assert native is not None
        if call:
            native.use_lanes(LANES_FROM)
            return
        try:
            agreed = _number(head)
        except msgspec.MsgspecError:
            agreed = -1
        if not self._offered or self._answered or not 0 <= agreed <= self._most:
            raise ProtocolError("protocol error: an answer to an offer of lanes that was not made so")
        self._answered = True
        if agreed:
            with contextlib.suppress(RuntimeError):  # no thread is left: then there are no lanes
                BackgroundThread(lambda: self._open(agreed), "phalanx-rpc-lanes").start()

    def _open(self, count: int) -> None:
        link, deadline = self._link, Deadline(OPEN_WITHIN)
        streams: list[Stream] = []
        try:
            for _ in range(count):
                streams.append(self._dial(deadline))
                if type(streams[-1]) is not Stream or link.ended is not None:
                    return
            # Before the other side can use them: it does as soon as all have come.
            link.pipe.open_lanes(streams)
            for number, stream in enumerate(streams, 1):
                joins = pack_header(CallKind.LANES, len(self._secret), number, 0) + self._secret
                write_all(stream, joins, deadline, "a lane")
        except (PhalanxError, StreamEnded, OSError):
            pass  # the link goes on without them
        finally:
            for stream in streams:
                stream.close()
            if link.ended is not None:
                link.pipe.sever_lanes()


class ServerLanes:
    """The side that accepts lanes.

    Args:
        most: How many it wants at most; 0: none, which the caller cannot know.
        links: The links of this agent, among which is the one that a lane belongs to.
    """

    def __init__(self, link: LanedLink, most: int, links: Iterable[LanedLink]) -> None:
        self._link = link
        self._most = most
        self._links = links
        self._secret = b""
        self._streams: dict[int, Stream] = {}
        self._agreed = 0

    def want(self) -> None:
        """Does nothing: the caller opens lanes."""

    def handle(self, call: int, head: bytes) -> None:
        """Handles an offer, or a connection that is to be a lane. Called by the mover."""
        if call:
            self._join(call, head)
            return
        try:
            secret, most = _offer(head)
        except msgspec.MsgspecError:
            secret, most = b"", 0
        if self._secret or len(secret) != _SECRET or most < 1:
            raise ProtocolError("protocol error: an offer of lanes that is malformed, or the second one")
        self._secret = secret
        self._agreed = min(most, self._most) if type(self._link.stream) is Stream else 0
        if self._agreed and not _can_open(2 * self._agreed + SPARE, self._link.stream.fd):
            self._agreed = 0
        with contextlib.suppress(PhalanxError):  # it has gone away meanwhile, as the mover will find
            self._link.send(CallKind.LANES, 0, pack(self._agreed))

    def _join(self, number: int, secret: bytes) -> None:
        link = self._link
        for other in tuple(self._links):
            lanes = other.lanes
            if (
                other.peer == link.peer
                and isinstance(lanes, ServerLanes)
                and lanes._secret
                and hmac.compare_digest(lanes._secret, secret)
            ):
                if other is link or self._secret or link.pipe.ahead or not lanes._seat(number, link.stream):
                    raise ProtocolError("protocol error: a lane of a link that does not want it")
                link.give_stream_away()
                return
        link.end(ChannelClosed(link.peer, "this connection was to be a lane of another one, which has ended"))

    def _seat(self, number: int, stream: Stream) -> bool:
        """Takes a connection as a lane; with the last, opens them all. False if there is no such seat."""
        if not 1 <= number <= self._agreed or number in self._streams or type(stream) is not Stream:
            return False
        self._streams[number] = stream.copy()
        if len(self._streams) == self._agreed:
            link, streams = self._link, [self._streams[i] for i in range(1, self._agreed + 1)]
            native = link.pipe.native
            assert native is not None
            link.pipe.open_lanes(streams)
            self.close()
            native.use_lanes(LANES_FROM)
            with contextlib.suppress(PhalanxError):
                link.send(CallKind.LANES, 1, b"")
        return True

    def close(self) -> None:
        """Closes what has joined and is not used."""
        for stream in self._streams.values():
            stream.close()


def _can_open(count: int, fd: int) -> bool:
    """Whether so many descriptors are to be had. A rank that has none when others connect to it ends its world."""
    opened: list[int] = []
    try:
        for _ in range(count):
            opened.append(os.dup(fd))  # noqa: PERF401 - those before one that fails are closed below
    except OSError:
        return False
    finally:
        for one in opened:
            os.close(one)
    return True


def given_away(peer: int) -> ChannelClosed:
    """The reason for the end of a link whose connection has become a lane."""
    return ChannelClosed(peer, "this connection is a lane of another one")
