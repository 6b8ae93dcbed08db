"""What the tests of rings share: a channel with both ends in one process, and ranks whose channels have gone over."""

from __future__ import annotations

import os
import socket
from typing import Any

import numpy as np

import phalanx as px
from phalanx._native import core, plain_arrays
from phalanx.errors import PeerLost
from phalanx.transports.channel import Inbound
from phalanx.transports.lending import NOTHING
from phalanx.transports.mailbox import BufferSink, Mailbox
from phalanx.transports.ring import InboundRing, OutboundRing, open_offer
from phalanx.transports.ring_channel import RingInbound, RingOutbound
from phalanx.transports.stream import Stream
from phalanx.wire.frames import FrameKind, pack_header

LIMIT = 1 << 30


class Pair:
    """A channel from end to end.

    Args:
        offers: Whether it goes over to a ring.
    """

    def __init__(self, *, offers: bool = True) -> None:
        near, far = socket.socketpair()
        self.mailbox = Mailbox()
        self.ends: list[tuple[str, Exception, bool]] = []
        self.far = Stream(far)
        self.sender = RingOutbound(
            Stream(near), 0, self._sending_ended, offers=offers, lending=NOTHING, switched=lambda channel, ring: None
        )
        self.receiver = RingInbound(
            self.far,
            0,
            self.mailbox,
            max_message=LIMIT,
            max_object=LIMIT,
            on_end=self._receiving_ended,
            open_ring=lambda description, stream: open_offer(description, os.getpid(), stream),
            switched=lambda channel, ring: None,
        )

    def _sending_ended(self, reason: Exception, goodbye: bool) -> BaseException:
        self.ends.append(("sender", reason, goodbye))
        return PeerLost(7, str(reason))

    def _receiving_ended(self, _channel: Inbound, reason: Exception, goodbye: bool) -> BaseException:
        self.ends.append(("receiver", reason, goodbye))
        return PeerLost(7, str(reason))

    def send(self, data: bytes, tag: int = 0) -> Any:
        return self.sender.send([pack_header(FrameKind.RAW, tag, 0, len(data)), data])

    def pump(self) -> None:
        while self.receiver.pump():
            pass

    def receive(self, size: int, tag: int = 0) -> bytes:
        target = bytearray(size)
        receive = self.mailbox.post(0, tag, BufferSink(memoryview(target)))
        self.pump()
        assert receive.done, "nothing came"
        assert receive.error is None
        return bytes(target)

    def go_over(self) -> None:
        while not isinstance(self.receiver.stream, InboundRing):
            assert self.send(b"warm").done
            assert self.receive(4) == b"warm"
        assert isinstance(self.sender.stream, OutboundRing)

    def close(self) -> None:
        self.receiver.end(PeerLost(7, "the test is over"))
        self.sender.end(PeerLost(7, "the test is over"))


class QuickOverStream:
    """The fast path on a pair whose channels stay plain streams."""

    def __init__(self, pair: Pair, timeout: float = 10.0) -> None:
        assert core is not None
        self.pair = pair
        self.recorder = core.Recorder()
        self.way = core.StreamMessages(1, pair.mailbox, plain_arrays(), self.recorder, timeout, LIMIT, False)
        self.way.open_out(0, pair.sender, pair.sender.queue)
        self.way.open_in(0, pair.receiver)

    def send(self, x: Any, tag: Any = 0, dst: Any = 0) -> Any:
        return self.way.send(x, dst, tag)

    def recv(self, out: Any, tag: Any = 0, src: Any = 0) -> Any:
        return self.way.recv(out, src, tag)


class Quick:
    """The fast path on a pair whose channels have gone over."""

    def __init__(self, pair: Pair, timeout: float = 10.0) -> None:
        assert core is not None
        pair.go_over()
        self.pair = pair
        self.recorder = core.Recorder()
        self.way = core.FastMessages(1, pair.mailbox, plain_arrays(), self.recorder, timeout, LIMIT, 100, 5)
        assert isinstance(pair.sender.stream, OutboundRing)
        assert isinstance(pair.receiver.stream, InboundRing)
        self.way.open_out(0, pair.sender.stream.ring, pair.sender, pair.sender.queue)
        self.way.open_in(0, pair.receiver.stream.ring, pair.receiver)

    def send(self, x: Any, tag: Any = 0, dst: Any = 0) -> Any:
        return self.way.send(x, dst, tag)

    def recv(self, out: Any, tag: Any = 0, src: Any = 0) -> Any:
        return self.way.recv(out, src, tag)


def streams(group: px.Group, peer: int) -> tuple[str, str]:
    """The kinds of the two channels with a peer."""
    lane: Any = group._messages
    [inbound] = lane.inbound(peer)
    return type(lane._outbound[peer].stream).__name__, type(inbound.stream).__name__


def warm(group: px.Group) -> None:
    """Talks to everybody until all channels are rings."""
    x = np.zeros(1)
    for _ in range(8):
        for step in range(1, group.world_size):
            dst, src = (group.rank + step) % group.world_size, (group.rank - step) % group.world_size
            group.send(x, dst)
            group.recv(x, src)
    for peer in range(group.world_size):
        if peer != group.rank:
            assert streams(group, peer) == (OutboundRing.__name__, InboundRing.__name__)


def quick_ones(group: px.Group) -> int:
    """How many messages went the fast path; as far as they are kept."""
    assert group._recorder is not None
    return sum(record[0] in ("send", "recv") for record in group._recorder.records())
