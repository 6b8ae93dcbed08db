"""Plain messages: they arrive whole and in order, and what cannot be is refused."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from ...errors import InvalidRank, NoConnection, SelfSend, SizeMismatch, UsageError
from .check import check
from .common import connected, expect, has_self, is_star, noise, pairs, sync

SIZES = (0, 1, 2, 7, 8, 1000, 4096, 65_535, 65_536, 65_537, 1 << 20, (3 << 20) + 5)


@check(ranks=3)
def ranks_are_numbered(backend: Any) -> None:
    """Ranks are numbered."""
    assert backend.world_size == 3
    assert 0 <= backend.rank < 3
    if backend.rank:
        backend.send(bytes([backend.rank]), 0)
    else:
        for peer in (1, 2):
            found = bytearray(1)
            backend.recv(found, peer)
            assert found[0] == peer, f"rank {peer} takes itself for rank {found[0]}"


@check(ranks=3)
def messages_arrive_intact(backend: Any) -> None:
    """Messages arrive intact."""
    for a, b in pairs(backend):
        for size in SIZES:
            if backend.rank == a:
                backend.send(noise(size, a, b), b)
            elif backend.rank == b:
                target = bytearray(size)
                backend.recv(target, a)
                assert target == noise(size, a, b), f"{size} bytes from rank {a} to rank {b} are not as they were sent"


@check(ranks=2)
def messages_keep_their_order(backend: Any) -> None:
    """Messages keep their order."""
    other = 1 - backend.rank
    count = 300
    for number in range(count):
        backend.send(number.to_bytes(4, "little"), other)
    target = bytearray(4)
    for number in range(count):
        backend.recv(target, other)
        assert int.from_bytes(target, "little") == number


@check(ranks=2)
def buffers_of_every_kind(backend: Any) -> None:
    """Buffers of every kind can be sent."""
    values = np.arange(12, dtype=np.float64).reshape(3, 4)
    sources: list[Any] = [b"0123456789ab" * 8, bytearray(96), memoryview(bytes(96)), values, values.reshape(-1)[::1]]
    targets: list[Any] = [
        bytearray(96),
        memoryview(bytearray(128))[16:112],
        np.zeros(12),
        np.zeros((2, 6)),
        bytearray(96),
    ]
    for source, target in zip(sources, targets, strict=True):
        if backend.rank == 0:
            backend.send(source, 1)
        else:
            backend.recv(target, 0)
            assert bytes(memoryview(target).cast("B")) == bytes(memoryview(source).cast("B"))


@check(ranks=2)
def sent_buffer_may_change(backend: Any) -> None:
    """A sent buffer may be changed at once."""
    size = 1 << 18
    if backend.rank == 0:
        data = bytearray(size)
        for value in range(8):
            data[:] = bytes([value]) * size
            backend.send(data, 1)
        backend.recv(bytearray(1), 1)
    else:
        target = bytearray(size)
        for value in range(8):
            backend.recv(target, 0)
            assert target == bytes([value]) * size
        backend.send(b"k", 0)


@check(ranks=2)
def another_length(backend: Any) -> None:
    """Another length is SizeMismatch."""
    # The message may be there before the receive or after it: both are tried. Each is dropped, and the next one is not.
    cases = [(10, 4), (4, 10), (0, 3), (3, 0), (100_000, 99_999), (99_999, 100_000)]
    for first in ("send", "recv"):
        for sent, wanted in cases:
            if backend.rank == 0:
                if first == "recv":
                    backend.recv(bytearray(1), 1)
                    time.sleep(0.002)  # most likely the other is waiting now; both ways must work
                backend.send(noise(sent), 1)
                backend.send(b"after", 1)
                if first == "send":
                    backend.send(b"now", 1)
            else:
                if first == "recv":
                    backend.send(b"g", 0)
                error = expect(SizeMismatch, backend.recv, bytearray(wanted), 0)
                assert (error.expected, error.got) == (wanted, sent)
                assert str(wanted) in str(error)
                assert str(sent) in str(error)
                target = bytearray(5)
                backend.recv(target, 0)
                assert target == b"after"
                if first == "send":
                    backend.recv(bytearray(3), 0)
    sync(backend)


@check(ranks=2)
def refused_message_leaves_the_buffer(backend: Any) -> None:
    """A refused message leaves the buffer alone."""
    if backend.rank == 0:
        backend.send(b"x" * 10, 1)
    else:
        target = bytearray(b"-" * 4)
        expect(SizeMismatch, backend.recv, target, 0)
        assert target == b"----"
    sync(backend)


@check(ranks=2)
def message_to_oneself(backend: Any) -> None:
    """A message to oneself."""
    me = backend.rank
    if has_self(backend):
        target = bytearray(5)
        for number in range(3):
            backend.send(b"self" + bytes([number]), me)
        for number in range(3):
            backend.recv(target, me)
            assert target == b"self" + bytes([number])
    else:
        assert expect(SelfSend, backend.send, b"x", me).peer == me
        assert expect(SelfSend, backend.recv, bytearray(1), me).peer == me
    sync(backend)


@check(ranks=2)
def invalid_rank(backend: Any) -> None:
    """A rank that does not exist is InvalidRank."""
    for rank in (-1, 2, 3, 1 << 40):
        for call in (lambda r=rank: backend.send(b"x", r), lambda r=rank: backend.recv(bytearray(1), r)):
            error = expect(InvalidRank, call)
            assert error.value == rank
            assert error.world_size == 2
            assert str(rank) in str(error)
    sync(backend)


@check(ranks=2)
def what_has_no_buffer(backend: Any) -> None:
    """An object without a buffer is refused."""
    other = 1 - backend.rank
    strided = np.zeros((4, 4))[:, ::2]
    unsendable: list[Any] = [None, 7, "text", [1, 2], strided]
    for bad in unsendable:
        expect(UsageError, backend.send, bad, other)
    read_only = np.zeros(4)
    read_only.flags.writeable = False
    unfillable: list[Any] = [None, "text", b"read-only", read_only, strided]
    for bad in unfillable:
        expect(UsageError, backend.recv, bad, other, timeout=5)
    # Nothing of it was sent, and no receive is left over.
    backend.send(b"fine", other)
    target = bytearray(4)
    backend.recv(target, other)
    assert target == b"fine"


@check(ranks=4)
def connections(backend: Any) -> None:
    """Every pair is connected, or says NoConnection."""
    me = backend.rank
    for a, b in pairs(backend):
        if me == a:
            backend.send(bytes([a, b]), b)
        elif me == b:
            target = bytearray(2)
            backend.recv(target, a)
            assert target == bytes([a, b])
    for peer in range(backend.world_size):
        if peer != me and not connected(backend, me, peer):
            assert is_star(backend)
            for call in (lambda p=peer: backend.send(b"x", p), lambda p=peer: backend.recv(bytearray(1), p)):
                error = expect(NoConnection, call)
                assert isinstance(error.peer, int)
                assert f"rank {error.peer}" in str(error)
                assert "mesh" in str(error).lower(), "the message should name the mesh as the way out"
    sync(backend)


@check(ranks=4)
def barrier_holds(backend: Any) -> None:
    """No rank leaves a barrier before all have come."""
    for late in range(4):
        if backend.rank == late:
            time.sleep(0.03)
        entered = time.monotonic()
        backend.barrier()
        left = time.monotonic()
        # The monotonic clock is one for all processes of a machine.
        if backend.rank == 0:
            times = np.zeros((4, 2))
            times[0] = entered, left
            for peer in range(1, 4):
                backend.recv(times[peer], peer)
            assert times[:, 1].min() >= times[:, 0].max(), f"late rank {late}: {times - times.min()}"
        else:
            backend.send(np.array([entered, left]), 0)


@check(ranks=3)
def barriers_follow(backend: Any) -> None:
    """Barriers follow each other."""
    for number in range(30):
        backend.barrier()
        if number % 10 == 0:  # messages between barriers are not taken for them
            if backend.rank == 1:
                backend.send(b"between", 0)
            elif backend.rank == 0:
                target = bytearray(7)
                backend.recv(target, 1)
                assert target == b"between"


@check(ranks=1)
def world_of_one(backend: Any) -> None:
    """A world of one."""
    assert (backend.rank, backend.world_size) == (0, 1)
    backend.barrier()
    expect(InvalidRank, backend.send, b"x", 1)
