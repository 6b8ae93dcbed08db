"""Point-to-point messages of a group."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from typing import Any

import numpy as np

from ...errors import ChannelClosed, PeerLost, SizeMismatch, Timeout, UsageError
from ...group import Group, Work
from ...types import Received
from .check import check
from .common import SHORT, connected, expect, noise, pairs, same, sync, within
from .threads import together

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


@check("arrays arrive as they were sent", ranks=3, lanes=True)
def arrays_arrive(backend: Any) -> None:
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


@check("buffers and read-only arrays", ranks=2, lanes=True)
def buffers(backend: Any) -> None:
    with Group(backend) as group:
        if group.rank == 0:
            for _ in range(3):
                group.send(b"0123456789", 1)
            frozen = np.arange(4)
            frozen.flags.writeable = False
            group.send(frozen, 1)
            group.send(np.arange(4), 1)
            group.send(np.float32(1.5), 1)
            group.send(memoryview(np.arange(6, dtype=np.int16).reshape(2, 3)), 1)
        else:
            made = group.recv(src=0)
            assert made.tobytes() == b"0123456789"
            target = bytearray(10)
            assert group.recv(target, 0) is target
            assert target == b"0123456789"
            view = memoryview(bytearray(20))[5:15]
            group.recv(view, 0)
            assert view == b"0123456789"
            assert group.recv(src=0).tolist() == [0, 1, 2, 3]
            frozen = np.zeros(4, np.int64)
            frozen.flags.writeable = False
            fresh = group.recv(frozen, 0)
            assert fresh.tolist() == [0, 1, 2, 3]
            assert frozen.tolist() == [0, 0, 0, 0]
            assert group.recv(src=0) == np.float32(1.5)
            assert group.recv(src=0).tolist() == [[0, 1, 2], [3, 4, 5]]
        group.barrier()


@check("an array of another size or dtype is refused", ranks=2, lanes=True)
def mismatch(backend: Any) -> None:
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


@check("the same number of elements in another shape", ranks=2, lanes=True)
def other_shape(backend: Any) -> None:
    with Group(backend) as group:
        if group.rank == 0:
            group.send(np.arange(6), 1)
        else:
            out = np.zeros((2, 3), np.int64)
            group.recv(out, 0)
            assert out.tolist() == [[0, 1, 2], [3, 4, 5]]
        group.barrier()


@check("tags keep messages apart", ranks=2, lanes=True)
def tags(backend: Any) -> None:
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


@check("a receive from anyone", ranks=4, lanes=True)
def from_anyone(backend: Any) -> None:
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
            out = np.zeros(2, np.int64)
            work = group.irecv(out)
        group.barrier()
        if group.rank == 1:
            group.send(np.array([8, 9]), 0)
        elif group.rank == 0:
            got = work.wait()
            assert got.src == 1
            assert got.data is out
            assert out.tolist() == [8, 9]
        group.barrier()


@check("a message to oneself in a group", ranks=2, lanes=True)
def to_oneself(backend: Any) -> None:
    if not connected(backend, 1, 1):
        return
    with Group(backend) as group:
        work = group.irecv(src=group.rank, tag=3)
        group.send(np.array([1, 2]), group.rank, tag=3)
        assert work.wait().tolist() == [1, 2]
        group.send_object({"a": (1, 2)}, group.rank)
        assert group.recv_object(group.rank) == {"a": (1, 2)}
        group.barrier()


@check("sendrecv exchanges arrays of any size", ranks=2, lanes=True)
def exchange(backend: Any) -> None:
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


@check("a receive that timed out leaves the group usable", ranks=2, lanes=True)
def receive_timeout(backend: Any) -> None:
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


@check("a timeout in the middle of an array loses nothing", ranks=2, lanes=True)
def timeout_in_the_middle(backend: Any) -> None:
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


@check("hundreds of messages under way at once", ranks=3, lanes=True)
def many_at_once(backend: Any) -> None:
    count = 120
    with Group(backend) as group:
        me = group.rank
        chooser = random.Random(me)
        jobs = [(kind, a, b, tag) for a, b in pairs(backend) for tag in range(count) for kind in "sr"]
        jobs = [job for job in jobs if job[1 if job[0] == "s" else 2] == me]
        chooser.shuffle(jobs)

        def size(a: int, b: int, tag: int) -> int:
            return (0, 3, 100, 2_000, 40_000)[(a + 2 * b + tag) % 5]

        works: list[tuple[Work, tuple[str, int, int, int]]] = []
        for job in jobs:
            kind, a, b, tag = job
            if kind == "s":
                works.append((group.isend(np.frombuffer(noise(size(a, b, tag), tag), np.uint8), b, tag=tag), job))
            else:
                out = bytearray(size(a, b, tag)) if tag % 2 else None
                works.append((group.irecv(out, a, tag=tag), job))
        chooser.shuffle(works)
        for number, (work, (kind, a, b, tag)) in enumerate(works):
            if number % 3 == 0:  # some are waited for, some end by themselves
                end = time.monotonic() + 20
                while not work.done() and time.monotonic() < end:
                    time.sleep(0.001)
                assert work.done(), "nobody moves what nobody waits for"
            result = work.wait()
            if kind == "r":
                assert bytes(memoryview(result)) == noise(size(a, b, tag), tag)
        group.barrier()


@check("receives in several threads of a rank", ranks=2, lanes=True)
def threads_receive(backend: Any) -> None:
    # Each waits for its own tag, and whoever reads the connection also reads what belongs to the others.
    threads, count = 6, 60
    with Group(backend) as group:
        other = 1 - group.rank

        def send() -> None:
            chooser = random.Random(7)
            order = [(tag, number) for tag in range(threads) for number in range(count)]
            order.sort(key=lambda _: chooser.random())
            numbers = dict.fromkeys(range(threads), 0)
            for tag, _ in order:
                group.send(np.array([tag, numbers[tag]]), other, tag=tag)
                numbers[tag] += 1

        def receive(tag: int) -> None:
            for number in range(count):
                assert group.recv(src=other, tag=tag, timeout=10).tolist() == [tag, number]

        together(send, *(lambda t=t: receive(t) for t in range(threads)))
        group.barrier()


@check("ping-pong in several threads never sleeps through a message", ranks=2, lanes=True)
def threads_ping_pong(backend: Any) -> None:
    threads, turns = 4, 150
    with Group(backend) as group:
        other = 1 - group.rank

        def play(tag: int) -> None:
            ball = np.zeros(1, np.int64)
            for turn in range(turns):
                if group.rank == 0:
                    group.send(np.array([turn]), other, tag=tag)
                    group.recv(ball, other, tag=tag, timeout=10)
                else:
                    group.recv(ball, other, tag=tag, timeout=10)
                    group.send(ball, other, tag=tag)
                assert ball[0] == turn

        together(*(lambda t=t: play(t) for t in range(threads)))
        group.barrier()


@check("work says how it stands", ranks=2, lanes=True)
def work_handles(backend: Any) -> None:
    with Group(backend) as group:
        if group.rank == 1:
            work = group.irecv(src=0)
            assert not work.done()
            assert work.exception() is None
            expect(UsageError, work.result)
            expect(Timeout, work.wait, SHORT)  # the wait ends, the work goes on
            told: list[Any] = []
            ended = threading.Event()
            work.add_done_callback(lambda w: (told.append(w), ended.set()))
            group.send(np.zeros(1), 0)
            assert work.wait().tolist() == [4]
            assert work.done()
            assert work.result().tolist() == [4]
            assert work.exception() is None
            assert ended.wait(5)
            assert told == [work]
            work.add_done_callback(told.append)
            assert told == [work, work]
        else:
            group.recv(src=1)
            work = group.isend(np.array([4]), 1)
            assert work.wait() is None
            assert work.done()
        group.barrier()


@check("work can be awaited", ranks=2, lanes=True)
def awaited(backend: Any) -> None:
    with Group(backend) as group:
        other = 1 - group.rank

        async def exchange_many() -> list[int]:
            receives = [group.irecv(src=other, tag=tag) for tag in range(20)]
            sends = [group.isend(np.array([tag]), other, tag=tag) for tag in reversed(range(20))]

            async def first(work: Work) -> int:
                return int((await work)[0])

            found = await asyncio.gather(*(first(work) for work in receives))
            for send in sends:
                await send
            return list(found)

        assert asyncio.run(exchange_many()) == list(range(20))

        async def fails() -> None:
            await group.irecv(src=other, tag=99, timeout=SHORT)

        expect(Timeout, asyncio.run, fails())

        async def gives_up() -> None:
            # The loop is gone when the work ends: that must harm nobody.
            await asyncio.wait_for(_as_coroutine(group.irecv(src=other, tag=98, timeout=4 * SHORT)), SHORT)

        expect(TimeoutError, asyncio.run, gives_up())
        time.sleep(5 * SHORT)
        assert group.all_reduce(np.array([1])).tolist() == [2]
        work = group.irecv(src=other, tag=1)  # whoever moves the bytes is still there
        group.send(np.array([3]), other, tag=1)
        end = time.monotonic() + 10
        while not work.done() and time.monotonic() < end:
            time.sleep(0.001)
        assert work.result().tolist() == [3]
        group.barrier()


async def _as_coroutine(work: Work) -> Any:
    return await work


@check("a callback that fails harms nobody else", ranks=2, lanes=True)
def failing_callback(backend: Any) -> None:
    import logging

    with Group(backend) as group:
        other = 1 - group.rank
        quiet = logging.getLogger("phalanx")
        level, quiet.level = quiet.level, logging.CRITICAL + 1
        try:
            first, second = group.irecv(src=other, tag=1), group.irecv(src=other, tag=2)

            def fails(_work: Work) -> None:
                raise RuntimeError("the callback's own trouble")

            first.add_done_callback(fails)
            group.send(np.array([1]), other, tag=1)
            group.send(np.array([2]), other, tag=2)
            assert first.wait().tolist() == [1]
            end = time.monotonic() + 10
            while not second.done() and time.monotonic() < end:
                time.sleep(0.001)
            assert second.done(), "the thread that moves the bytes is gone"
            group.barrier()
        finally:
            quiet.level = level


@check("asynchronous sends to a rank that does not receive end in time", ranks=2, lanes=True)
def async_send_timeout(backend: Any) -> None:
    with Group(backend) as group:
        if group.rank == 0:
            works = [group.isend(np.zeros(BIG, np.uint8), 1, timeout=4 * SHORT) for _ in range(3)]
            for work in works:
                within(5, work_ends, work)
                # The first may have been cut short in the middle: then the others cannot go out either.
                assert work.exception() is None or isinstance(work.exception(), (Timeout, ChannelClosed))
            failed = [work.exception() for work in works if work.exception() is not None]
            assert not failed or isinstance(failed[0], Timeout), failed
        else:
            time.sleep(12 * SHORT)


def work_ends(work: Work) -> None:
    """Waits for work whose error does not matter here."""
    try:
        work.wait()
    except (Timeout, PeerLost):
        assert work.done()


@check("what was sent before a group closed still arrives", ranks=2, lanes=True)
def sent_before_close(backend: Any) -> None:
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
    sync(backend)
