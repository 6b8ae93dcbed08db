"""Many messages under way at once, in several threads, and the work that stands for them."""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import threading
import time
from typing import Any

import numpy as np

from ...errors import ChannelClosed, PeerLost, Timeout, UsageError
from ...group import Group, Work
from .check import check
from .common import SHORT, expect, noise, pairs, within
from .threads import together

BIG = 24 << 20


@check(ranks=3)
def many_at_once(backend: Any) -> None:
    """Hundreds of messages under way at once."""
    count = 120
    with Group(backend) as group:
        me = group.rank
        chooser = random.Random(me)  # noqa: S311
        jobs = [(kind, a, b, tag) for a, b in pairs(backend) for tag in range(count) for kind in "sr"]
        jobs = [job for job in jobs if job[1 if job[0] == "s" else 2] == me]
        chooser.shuffle(jobs)

        def size(a: int, b: int, tag: int) -> int:
            return (0, 3, 100, 2_000, 40_000)[(a + 2 * b + tag) % 5]

        works: list[tuple[Work[Any], tuple[str, int, int, int]]] = []
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
                assert work.done(), "no thread moves a message that no caller waits for"
            result = work.wait()
            if kind == "r":
                assert bytes(memoryview(result)) == noise(size(a, b, tag), tag)
        group.barrier()


@check(ranks=2)
def threads_receive(backend: Any) -> None:
    """Receives in several threads of a rank."""
    # Each waits for its own tag, and the thread that reads the connection also reads messages of the others.
    threads, count = 6, 60
    with Group(backend) as group:
        other = 1 - group.rank

        def send() -> None:
            chooser = random.Random(7)  # noqa: S311
            order = [(tag, number) for tag in range(threads) for number in range(count)]
            order.sort(key=lambda _: chooser.random())
            numbers = dict.fromkeys(range(threads), 0)
            for tag, _ in order:
                group.send(np.array([tag, numbers[tag]]), other, tag=tag)
                numbers[tag] += 1

        def receive(tag: int) -> None:
            for number in range(count):
                assert group.recv(src=other, tag=tag, timeout=10).tolist() == [tag, number]

        together(send, *(functools.partial(receive, tag) for tag in range(threads)))
        group.barrier()


@check(ranks=2)
def threads_ping_pong(backend: Any) -> None:
    """Ping-pong in several threads never sleeps through a message."""
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

        together(*(functools.partial(play, tag) for tag in range(threads)))
        group.barrier()


@check(ranks=2)
def work_handles(backend: Any) -> None:
    """Work tells its state."""
    with Group(backend) as group:
        if group.rank == 1:
            work = group.irecv(src=0)
            assert not work.done()
            assert work.exception() is None
            expect(UsageError, work.result)
            expect(Timeout, work.wait, SHORT)  # the wait ends, the work goes on
            told: list[Any] = []
            ended = threading.Event()
            work.add_done_callback(told.append)
            work.add_done_callback(lambda _work: ended.set())
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


@check(ranks=2)
def awaited(backend: Any) -> None:
    """Work can be awaited."""
    with Group(backend) as group:
        other = 1 - group.rank

        async def exchange_many() -> list[int]:
            receives = [group.irecv(src=other, tag=tag) for tag in range(20)]
            sends = [group.isend(np.array([tag]), other, tag=tag) for tag in reversed(range(20))]

            async def first(work: Work[Any]) -> int:
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
            # The loop is gone when the work ends: that must do no harm.
            await asyncio.wait_for(_as_coroutine(group.irecv(src=other, tag=98, timeout=4 * SHORT)), SHORT)

        expect(TimeoutError, asyncio.run, gives_up())
        time.sleep(5 * SHORT)
        assert group.all_reduce(np.array([1])).tolist() == [2]
        work = group.irecv(src=other, tag=1)  # the thread that moves the bytes is still there
        group.send(np.array([3]), other, tag=1)
        end = time.monotonic() + 10
        while not work.done() and time.monotonic() < end:
            time.sleep(0.001)
        assert work.result().tolist() == [3]
        group.barrier()


async def _as_coroutine(work: Work[Any]) -> Any:
    return await work


@check(ranks=2)
def failing_callback(backend: Any) -> None:
    """A callback that fails does not harm other operations."""
    with Group(backend) as group:
        other = 1 - group.rank
        quiet = logging.getLogger("phalanx")
        level, quiet.level = quiet.level, logging.CRITICAL + 1
        try:
            first, second = group.irecv(src=other, tag=1), group.irecv(src=other, tag=2)

            def fails(_work: Work[Any]) -> None:
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


@check(ranks=2)
def async_send_timeout(backend: Any) -> None:
    """Asynchronous sends to a rank that does not receive end in time."""
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


def work_ends(work: Work[Any]) -> None:
    """Waits for work whose error does not matter here."""
    try:
        work.wait()
    except (Timeout, PeerLost):
        assert work.done()
