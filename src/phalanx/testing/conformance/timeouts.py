"""A wait that ends too early must cost nothing but the wait."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from ...errors import SizeMismatch, Timeout, UsageError
from .check import check
from .common import SHORT, expect, noise, sync

BIG = 48 << 20
"""More than the kernel keeps in its buffers, so that a sender is still at it when the receiver gives up."""


@check(ranks=2)
def receive_times_out(backend: Any) -> None:
    """A receive can time out."""
    if backend.rank == 1:
        start = time.monotonic()
        error = expect(Timeout, backend.recv, bytearray(4), 0, timeout=SHORT)
        took = time.monotonic() - start
        assert isinstance(error, TimeoutError)
        assert took >= SHORT * 0.9, f"it gave up after {took:.3f} s of {SHORT} s"
        assert took < SHORT + 5
        assert error.missing == (error.peer,)
        expect(Timeout, backend.recv, bytearray(4), 0, timeout=0)
    sync(backend)


@check(ranks=2)
def bad_timeouts(backend: Any) -> None:
    """A timeout that is no time is refused."""
    other = 1 - backend.rank
    for bad in (-1, float("nan")):
        expect(UsageError, backend.recv, bytearray(1), other, timeout=bad)
        expect(UsageError, backend.send, b"x", other, timeout=bad)
    sync(backend)


@check(ranks=2)
def late_message(backend: Any) -> None:
    """A message after a timeout is not lost."""
    if backend.rank == 1:
        for number in range(5):
            expect(Timeout, backend.recv, bytearray(8), 0, timeout=SHORT / 5)
            backend.send(b"now", 0)
            target = bytearray(8)
            backend.recv(target, 0)
            assert target == b"message" + bytes([number])
    else:
        for number in range(5):
            backend.recv(bytearray(3), 1)
            backend.send(b"message" + bytes([number]), 1)


@check(ranks=2)
def timeout_in_the_middle(backend: Any) -> None:
    """A timeout in the middle of a message loses nothing."""
    if backend.rank == 0:
        backend.recv(bytearray(1), 1)
        backend.send(noise(BIG), 1)
        backend.send(b"after", 1)
        return
    backend.send(b"g", 0)
    target = bytearray(BIG)
    while True:
        try:
            backend.recv(target, 0, timeout=0.001)
            break
        except Timeout:
            # A receiver that gave up may do what it likes with its memory.
            target[: 1 << 16] = bytes(1 << 16)
    assert target == noise(BIG)
    after = bytearray(5)
    backend.recv(after, 0)
    assert after == b"after"


@check(ranks=2)
def buffer_after_timeout(backend: Any) -> None:
    """A buffer is the caller's again after a timeout."""
    if backend.rank == 0:
        backend.recv(bytearray(1), 1)
        backend.send(noise(BIG), 1)
        return
    backend.send(b"g", 0)
    first = bytearray(BIG)
    try:
        backend.recv(first, 0, timeout=0.003)
    except Timeout:
        kept = bytes(first)
        second = bytearray(BIG)
        backend.recv(second, 0)
        assert bytes(first) == kept, "the rest of the message went into a buffer that was given back"
        first = second
    assert first == noise(BIG)


@check(ranks=2)
def mismatch_after_timeout(backend: Any) -> None:
    """The length rule holds after a timeout in the middle."""
    if backend.rank == 0:
        backend.recv(bytearray(1), 1)
        backend.send(noise(BIG), 1)
        backend.send(b"after", 1)
        return
    backend.send(b"g", 0)
    try:
        backend.recv(bytearray(BIG), 0, timeout=0.003)
    except Timeout:
        error = expect(SizeMismatch, backend.recv, bytearray(3), 0)
        assert (error.expected, error.got) == (3, BIG)
    after = bytearray(5)
    backend.recv(after, 0)
    assert after == b"after"


@check(ranks=2)
def barrier_times_out(backend: Any) -> None:
    """A barrier can time out."""
    if backend.rank == 0:
        error = expect(Timeout, backend.barrier, timeout=SHORT)
        assert error.missing
        backend.barrier()  # rank 1 comes late: nothing of the first try is in the way
    else:
        time.sleep(SHORT * 2)
        backend.barrier()
    sync(backend)


@check(ranks=2)
def send_times_out(backend: Any) -> None:
    """A send to a rank that does not receive ends in time."""
    if backend.rank == 0:
        start = time.monotonic()
        with contextlib.suppress(Timeout):
            for _ in range(4):  # a backend may have room for some of it
                backend.send(bytes(BIG), 1, timeout=SHORT)
        assert time.monotonic() - start < 4 * SHORT + 5
    else:
        time.sleep(SHORT * 6)
