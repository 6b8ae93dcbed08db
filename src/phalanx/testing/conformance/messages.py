"""Point-to-point messages of a group."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from ...backends.base import LaneBackend
from ...errors import SizeMismatch, Timeout, UsageError
from ...group import Group
from ...types import Received
from .check import check
from .common import SHORT, connected, expect, noise, pairs, same, sync

DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip
BIG = 24 << 20


def arrays() -> list[Any]:
    """Arrays of every dtype and of odd shapes, the same on all ranks."""
    values = np.random.default_rng(5)
    found: list[Any] = [values.integers(0, 2, 37).astype(dtype) for dtype in DTYPES]
    found += [np.zeros(0), np.zeros((3, 0, 2)), np.array(2.5), values.random((3, 4, 5)), values.random(100_000)]
    found += [values.random((6, 8))[::2, 1::3], values.random((4, 5)).T, np.asfortranarray(values.random((4, 5)))]
    return found


@check(ranks=3)
def arrays_arrive(backend: Any) -> None:
    """Arrays arrive as they were sent."""
    with Group(backend) as group:
        for a, b in pairs(backend):
            for array in arrays():
                if group.rank == a:
                    group.send(array, b)
                    group.send(array, b)
                elif group.rank == b:
                    made = group.recv(src=a)
                    assert same(made, np.ascontiguousarray(array).reshape(array.shape))
                    assert made.flags.writeable
                    out = np.zeros_like(array)  # keeps the memory order, which must not matter
                    assert group.recv(out, a) is out
                    assert np.array_equal(out, array)
        group.barrier()


@check(ranks=2)
def buffers(backend: Any) -> None:
    """Buffers and read-only arrays."""
    with Group(backend) as group:
        if group.rank == 0:
            for _ in range(3):
                group.send(b"0123456789", 1)
            frozen = np.arange(4)
            frozen.flags.writeable = False
            group.send(frozen, 1)
            group.send(np.arange(4), 1)
            group.send(np.float32(1.5), 1)
            group.send(np.arange(6, dtype=np.int16).reshape(2, 3).data, 1)
        else:
            made = group.recv(src=0)
            assert made.tobytes() == b"0123456789"
            target = bytearray(10)
            assert group.recv(target, 0) is target
            assert target == b"0123456789"
            view = memoryview(bytearray(20))[5:15]
            group.recv(view, 0)
            assert bytes(view) == b"0123456789"
            assert group.recv(src=0).tolist() == [0, 1, 2, 3]
            frozen = np.zeros(4, np.int64)
            frozen.flags.writeable = False
            fresh = group.recv(frozen, 0)
            assert fresh.tolist() == [0, 1, 2, 3]
            assert frozen.tolist() == [0, 0, 0, 0]
            assert group.recv(src=0) == np.float32(1.5)
            assert group.recv(src=0).tolist() == [[0, 1, 2], [3, 4, 5]]
        group.barrier()


@check(ranks=2)
def mismatch(backend: Any) -> None:
    """An array of another size or dtype is refused."""
    with Group(backend) as group:
        if group.rank == 0:
            for _ in range(2):
                group.send(np.zeros(4, np.float32), 1)
                group.send(np.zeros(4, np.float32), 1)
                group.send(np.array([7.0]), 1)
                group.recv(src=1)
        else:
            for early in (True, False):
                if early:
                    time.sleep(0.02)
                error = expect(SizeMismatch, group.recv, np.zeros(3, np.float32), 0)
                assert (error.expected, error.got) == (12, 16)
                assert error.peer == group.members[0]
                text = str(expect(UsageError, group.recv, np.zeros(4, np.int32), 0))
                assert "f4" in text or "float32" in text
                # Both were dropped, and the next is untouched.
                assert group.recv(np.zeros(1), 0).tolist() == [7]
                group.send(np.zeros(1), 0)
        group.barrier()


@check(ranks=2)
def other_shape(backend: Any) -> None:
    """The same number of elements in another shape."""
    with Group(backend) as group:
        if group.rank == 0:
            group.send(np.arange(6), 1)
        else:
            out = np.zeros((2, 3), np.int64)
            group.recv(out, 0)
            assert out.tolist() == [[0, 1, 2], [3, 4, 5]]
        group.barrier()


@check(ranks=2)
def tags(backend: Any) -> None:
    """Tags keep messages apart."""
    with Group(backend) as group:
        wanted = [0, 1, 2, 1 << 40, (1 << 63) - 1]
        if group.rank == 0:
            for tag in wanted:
                for number in range(3):
                    group.send(np.array([tag % 1000, number]), 1, tag=tag)
        else:
            for tag in reversed(wanted):
                for number in range(3):
                    assert group.recv(src=0, tag=tag).tolist() == [tag % 1000, number]
            expect(Timeout, group.recv, src=0, tag=5, timeout=SHORT)
        group.barrier()


@check(ranks=4)
def from_anyone(backend: Any) -> None:
    """A receive from anyone."""
    with Group(backend) as group:
        count = 10
        if group.rank:
            for number in range(count):
                group.send(np.array([group.rank, number]), 0, tag=group.rank % 2)
        else:
            seen: dict[int, list[int]] = {1: [], 2: [], 3: []}
            for tag, messages in ((0, count), (1, 2 * count)):
                for _ in range(messages):
                    got = group.recv(tag=tag)
                    assert isinstance(got, Received)
                    assert got.tag == tag
                    assert got.data[0] == got.src
                    seen[got.src].append(int(got.data[1]))
            assert all(numbers == list(range(count)) for numbers in seen.values())
            expect(Timeout, group.recv, timeout=SHORT)
        group.barrier()
        out = np.zeros(2, np.int64)
        if group.rank == 1:
            group.send(np.array([8, 9]), 0)
        elif group.rank == 0:
            got = group.irecv(out).wait()
            assert got.src == 1
            assert got.data is out
            assert out.tolist() == [8, 9]
        group.barrier()


@check(ranks=2)
def to_oneself(backend: Any) -> None:
    """A message to oneself in a group."""
    if not connected(backend, 1, 1):
        return
    with Group(backend) as group:
        work = group.irecv(src=group.rank, tag=3)
        group.send(np.array([1, 2]), group.rank, tag=3)
        assert work.wait().tolist() == [1, 2]
        group.send_object({"a": (1, 2)}, group.rank)
        assert group.recv_object(group.rank) == {"a": (1, 2)}
        group.barrier()


@check(ranks=2)
def exchange(backend: Any) -> None:
    """Sendrecv exchanges arrays of any size."""
    with Group(backend) as group:
        other = 1 - group.rank
        for count in (0, 1, 1000, BIG // 8):
            mine = np.full(count, group.rank, np.float64)
            got = group.sendrecv(mine, other, np.empty(count), other)
            assert got.shape == (count,)
            assert (got == other).all()
        got = group.sendrecv(np.array([group.rank]), other, src=other, tag=4)
        assert got.tolist() == [other]
        anyone = group.sendrecv(np.array([group.rank]), other)
        assert (anyone.src, anyone.data.tolist()) == (other, [other])
        group.barrier()


@check(ranks=2)
def receive_timeout(backend: Any) -> None:
    """A receive that timed out leaves the group usable."""
    with Group(backend) as group:
        other = 1 - group.rank
        if group.rank == 1:
            error = expect(Timeout, group.recv, src=0, timeout=SHORT)
            assert error.missing == (group.members[0],)
            assert error.peer == group.members[0]
            assert "recv" in str(error)
            work = group.irecv(src=0, timeout=SHORT)
            expect(Timeout, work.wait)
            assert isinstance(work.exception(), Timeout)
            expect(Timeout, group.recv_object, 0, timeout=SHORT)
            group.send(np.zeros(1), 0)
            assert group.recv(src=0).tolist() == [1, 2, 3]
        else:
            group.recv(src=1)
            group.send(np.array([1, 2, 3]), other)
        group.barrier()


@check(ranks=2)
def timeout_in_the_middle(backend: Any) -> None:
    """A timeout in the middle of an array loses nothing."""
    with Group(backend) as group:
        if group.rank == 0:
            group.recv(src=1)
            group.send(np.frombuffer(noise(BIG), np.uint8), 1)
            group.send(np.array([5]), 1)
        else:
            group.send(np.zeros(1), 0)
            while True:
                try:
                    got = group.recv(src=0, timeout=0.001)
                    break
                except Timeout:
                    continue
            assert got.tobytes() == noise(BIG)
            assert group.recv(src=0).tolist() == [5]
        group.barrier()


@check(ranks=2)
def sent_before_close(backend: Any) -> None:
    """A message sent before its group closed still arrives."""
    group = Group(backend)
    if group.rank == 0:
        works = [group.isend(np.full(1000, number), 1, tag=number) for number in range(10)]
        group.close()
        assert all(work.done() for work in works)
    else:
        time.sleep(0.05)
        for number in reversed(range(10)):
            assert (group.recv(src=0, tag=number) == number).all()
        group.close()
    if isinstance(backend, LaneBackend):  # on a plain one, raw messages must rest until all have closed their groups
        sync(backend)
