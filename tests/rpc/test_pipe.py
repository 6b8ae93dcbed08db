"""The pipe in Python, which remote calls have under TLS and without the core."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence

import pytest
from tests.rpc.support import open_rings

from phalanx import _native
from phalanx.rpc.pipe import open_pipe
from phalanx.transports.duplex_ring import RingAgreement
from phalanx.transports.stream import Buffer, Stream, StreamEnded
from phalanx.wire.calls import CallKind, pack_header


class Interrupted(Stream):
    """Ctrl-C comes just after the system has moved bytes."""

    interrupted = False

    def receive_into(self, view: memoryview) -> int:
        count = super().receive_into(view)
        if self.interrupted:
            raise KeyboardInterrupt
        return count

    def send(self, views: Sequence[Buffer]) -> int:
        count = super().send(views)
        if self.interrupted:
            raise KeyboardInterrupt
        return count


@pytest.fixture
def ends() -> Iterator[tuple[Interrupted, socket.socket]]:
    mine, other = socket.socketpair()
    with mine, other:
        yield Interrupted(mine), other


def test_what_an_interrupt_loses_is_seen_in_the_counts(ends: tuple[Interrupted, socket.socket]) -> None:
    """A link compares them with its own: else a call whose answer was lost would wait until its deadline."""
    stream, other = ends
    frame = pack_header(CallKind.RESULT, 1, 7, 0) + b"\1"
    pipe = open_pipe(stream)
    other.sendall(frame)
    assert len(pipe.pull(0, 8)) == 1
    assert pipe.send(CallKind.RESULT, 7, b"\1", (), 0) == len(frame)
    assert (pipe.taken, pipe.written) == (1, len(frame))
    stream.interrupted = True
    other.sendall(frame)
    with pytest.raises(KeyboardInterrupt):
        pipe.pull(0, 8)
    assert pipe.taken != 1
    with pytest.raises(KeyboardInterrupt):
        pipe.send(CallKind.RESULT, 7, b"\1", (), 0)
    assert pipe.written != len(frame)


@pytest.mark.skipif(not _native.available, reason="only the core does so (PHALANX_PURE is set)")
def test_the_head_of_a_long_payload_goes_ahead_of_it() -> None:
    """The other side plans while the payload is copied. Packets show what was sent in one piece."""
    mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with mine, other:
        open_pipe(Stream(mine)).send(CallKind.RESULT, 7, b"head", [memoryview(bytes(300 << 10))], 300 << 10)
        assert other.recv(1 << 20) == pack_header(CallKind.RESULT, 4, 7, 300 << 10) + b"head"
        open_pipe(Stream(mine)).send(CallKind.RESULT, 8, b"head", [memoryview(bytes(1000))], 1000)
        other.settimeout(5)
        assert any(len(other.recv(1 << 20)) == 24 + 4 + 1000 for _ in range(2))


@pytest.mark.skipif(not _native.available, reason="only the core has rings (PHALANX_PURE is set)")
@pytest.mark.parametrize("severed", [False, True])
def test_a_ring_that_the_other_side_has_closed_ends_without_a_word_on_the_socket(severed: bool) -> None:
    """Whoever looks at several rings looks at no socket while one of them has news, and its end is some."""
    pair = [Stream(end) for end in socket.socketpair()]
    mine, theirs = (RingAgreement(stream, os.getpid()) for stream in pair)
    assert theirs.accept(mine.offer())
    assert mine.accept(theirs.offer())
    rings, others = mine.stream(), theirs.stream()
    try:
        pipe = open_pipe(rings)
        open_pipe(others).send(CallKind.RESULT, 7, b"last", (), 0)
        if severed:
            others.outbound.sever()
        others.outbound.close()
        assert [found[:3] for found in pipe.pull(0, 8)] == [(CallKind.RESULT, 7, b"last")]
        assert pipe.pull(0, 8) == []
        with pytest.raises(StreamEnded):
            pipe.check()
    finally:
        rings.close()
        others.close()


@pytest.mark.skipif(not _native.available, reason="only the core has rings (PHALANX_PURE is set)")
@pytest.mark.parametrize("closed_before", ["accept", "offer", "stream"])
def test_an_agreement_that_another_thread_closes_leaves_no_memory(closed_before: str) -> None:
    """The agent is closed while its thread answers the offer of a rank that connects."""
    pair = [Stream(end) for end in socket.socketpair()]
    before = open_rings()
    mine, theirs = (RingAgreement(stream, os.getpid()) for stream in pair)
    offer = mine.offer()
    if closed_before == "accept":
        theirs.close()
    assert theirs.accept(offer) is (closed_before != "accept")
    if closed_before == "offer":
        theirs.close()
    assert bool(theirs.offer()) is (closed_before == "stream")
    theirs.close()
    assert not theirs.complete
    with pytest.raises(StreamEnded):
        theirs.stream()
    mine.close()
    assert open_rings() == before
    for stream in pair:
        stream.close()
