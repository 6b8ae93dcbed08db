"""The pipe in Python, which remote calls have under TLS and without the core."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence

import pytest

from phalanx.rpc.pipe import open_pipe
from phalanx.transports.stream import Buffer, Stream
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
