"""Closing: final, allowed twice, and noticed by the other ranks."""

from __future__ import annotations

import time
from typing import Any

from ...backends import SubBackend
from ...errors import Closed, PeerLost
from .check import check
from .common import expect, is_classic, sync, within


@check(ranks=2)
def use_after_close(backend: Any) -> None:
    """Use after close raises Closed."""
    other = 1 - backend.rank
    sync(backend)
    backend.close()
    expect(Closed, backend.send, b"x", other)
    expect(Closed, backend.recv, bytearray(1), other)
    expect(Closed, backend.barrier)
    backend.close()
    assert (backend.rank, backend.world_size) == (1 - other, 2)


@check(ranks=2)
def sent_before_close(backend: Any) -> None:
    """A message sent before a close still arrives."""
    size = 1 << 16  # fits the buffers on the way, so that the sender need not wait
    if backend.rank == 0:
        for number in range(4):
            backend.send(bytes([number]) * size, 1)
        backend.close()
    else:
        time.sleep(0.05)
        target = bytearray(size)
        for number in range(4):
            backend.recv(target, 0)
            assert target == bytes([number]) * size
        within(5, expect, PeerLost, backend.recv, bytearray(1), 0)


@check(ranks=2)
def receive_from_closed(backend: Any) -> None:
    """A receive ends when the other side closes."""
    # Who leaves a sub-group says so only to those it has talked to; who leaves a world is missed by all.
    talked = isinstance(backend, SubBackend)
    if backend.rank == 0:
        backend.recv(bytearray(1), 1)
        if talked:
            backend.send(b"t", 1)
        time.sleep(0.05)  # the other waits by now, most likely; both ways must work
        backend.close()
    else:
        backend.send(b"w", 0)
        if talked:
            backend.recv(bytearray(1), 0)
        error = within(5, expect, PeerLost, backend.recv, bytearray(1), 0)
        assert isinstance(error.peer, int)
        within(5, expect, PeerLost, backend.recv, bytearray(1), 0)


@check(ranks=2)
def send_to_closed(backend: Any) -> None:
    """A send to a rank that has closed fails."""
    if backend.rank == 0:
        backend.recv(bytearray(1), 1)
        backend.close()
        return
    backend.send(b"w", 0)
    if isinstance(backend, SubBackend) and is_classic(backend):
        return  # the classic wire carries all groups on one connection, and a sender does not read what comes on it

    def send_until_it_fails() -> None:
        for _ in range(200):  # the first may still go out before the end is known
            backend.send(bytes(1000), 0)
            time.sleep(0.01)

    within(5, expect, PeerLost, send_until_it_fails)


@check(ranks=2)
def answer_before_close(backend: Any) -> None:
    """An answer that came before the close is not lost."""
    if backend.rank == 0:
        backend.send(b"answer", 1)
        backend.close()
        return
    time.sleep(0.05)
    try:
        for _ in range(20):
            backend.send(bytes(1000), 0)
            time.sleep(0.005)
    except PeerLost:
        pass
    target = bytearray(6)
    backend.recv(target, 0)
    assert target == b"answer"
