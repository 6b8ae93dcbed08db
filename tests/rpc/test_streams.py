"""Generators on another rank: their items as they come, at the reader's pace, and how they end."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
from tests.rpc.support import error_of, run, until

from phalanx.errors import RemoteError, Timeout
from phalanx.rpc import Agent, RemoteStream
from phalanx.rpc.link import WINDOW

SLACK = 1
"""An item that is made, but not yet sent."""


def serve(agent: Agent) -> None:
    made = {"items": 0, "ended": 0}
    """How many items were yielded, and how many generators have ended, for whatever reason."""

    def count(n: int, pause: float = 0.0) -> Iterator[int]:
        try:
            for number in range(n):
                made["items"] += 1
                yield number
                time.sleep(pause)
        finally:
            made["ended"] += 1

    async def count_soon(n: int, pause: float = 0.0) -> AsyncIterator[int]:
        try:
            for number in range(n):
                made["items"] += 1
                yield number
                await asyncio.sleep(pause)
        finally:
            made["ended"] += 1

    def arrays(n: int, size: int) -> Iterator[np.ndarray[Any, Any]]:
        for number in range(n):
            yield np.full(size, number, np.uint8)

    def breaks(n: int) -> Iterator[int]:
        yield from range(n)
        raise ValueError("in the middle")

    async def breaks_soon(n: int) -> AsyncIterator[int]:
        for number in range(n):
            yield number
        raise ValueError("in the middle")

    def odd() -> Iterator[Any]:
        yield 1
        yield object()

    def through(n: int) -> Iterator[int]:
        for number in range(n):
            time.sleep(0.1)
            yield agent.call(0, "one") * number

    def reset() -> None:
        made.update(items=0, ended=0)

    for function in (count, count_soon, arrays, breaks, breaks_soon, odd, through, reset):
        agent.register(function)
    agent.register("made", lambda: made)
    agent.register("one", lambda: 1)


BOTH = ("count", "count_soon")


def read(agent: Agent) -> None:
    for dst in range(2):
        for name in BOTH:
            for n in (0, 1, WINDOW - 1, WINDOW, WINDOW + 1, 200):
                stream = agent.call(dst, name, n)
                assert isinstance(stream, RemoteStream)
                assert list(stream) == list(range(n))
                assert list(stream) == []
        assert [(len(x), int(x[0]), int(x[-1])) for x in agent.call(dst, "arrays", 40, 300_000)] == [
            (300_000, n, n) for n in range(40)
        ]
        assert list(agent.call_async(dst, "count", 100).result()) == list(range(100))
    agent.call(1, "reset")
    agent.notify(1, "count", 50)  # nobody listens, but it may do something
    agent.notify(1, "count_soon", 50)
    until(lambda: agent.call(1, "made") == {"items": 100, "ended": 2}, "generators that were notified")


@pytest.mark.parametrize("kind", ["simulated", "classic mesh"])
def test_items_come_in_order(kind: str) -> None:
    run(kind, 2, serve, read)


def test_items_come_in_order_between_processes(stream: str) -> None:
    run(stream, 2, serve, read)


async def read_soon(agent: Agent) -> None:
    for name in BOTH:
        for dst in range(2):
            got = [item async for item in await agent.acall(dst, name, 100)]
            assert got == list(range(100))

    async def one(name: str, n: int) -> list[int]:
        return [item async for item in await agent.acall(1, name, n)]

    many = await asyncio.gather(*(one(BOTH[n % 2], 50 + n) for n in range(10)))
    assert many == [list(range(50 + n)) for n in range(10)]
    slow = [item async for item in await agent.acall(1, "count_soon", 5, 0.05)]
    assert slow == list(range(5))


def test_asynchronous_reading(where: str) -> None:
    run(where, 2, serve, lambda agent: asyncio.run(read_soon(agent)))


def two_at_once(agent: Agent) -> None:
    one, two = agent.call(1, "count", 200), agent.call(1, "count_soon", 200)
    assert list(zip(one, two, strict=True)) == [(n, n) for n in range(200)]
    streams = [agent.call(1, BOTH[n % 2], 100) for n in range(10)]
    totals = [0] * 10

    def drain(number: int) -> None:
        totals[number] = sum(streams[number])

    threads = [threading.Thread(target=drain, args=(number,)) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert totals == [4950] * 10
    assert agent.call(1, "one") == 1


def test_streams_beside_each_other(where: str) -> None:
    """More streams than workers: one that waits for its reader needs none."""
    run(where, 2, serve, two_at_once, workers=2)


def at_the_readers_pace(agent: Agent, name: str) -> list[int]:
    agent.call(1, "reset")
    ahead = []
    stream = agent.call(1, name, 10_000)
    for taken in range(1, 80):
        assert next(stream) == taken - 1
        if taken % 10 == 0:
            time.sleep(0.03)  # as much as it can make meanwhile
            ahead.append(agent.call(1, "made")["items"] - taken)
    stream.close()
    until(lambda: agent.call(1, "made")["ended"] == 1, "the end of the generator")
    return ahead


@pytest.mark.parametrize("name", BOTH)
def test_the_writer_keeps_the_readers_pace(where: str, name: str) -> None:
    ahead = run(where, 2, serve, at_the_readers_pace, name)
    assert max(ahead) <= WINDOW + SLACK
    assert max(ahead) >= WINDOW // 2  # and it does not wait for each single one


def endings(agent: Agent, name: str) -> None:
    def ended(act: Any) -> None:
        agent.call(1, "reset")
        act()
        gc.collect()
        until(lambda: agent.call(1, "made")["ended"] == 1, f"the end of a generator after {act.__name__}")
        assert agent.call(1, "made")["items"] < 100

    def close() -> None:
        stream = agent.call(1, name, 10_000)
        assert next(stream) == 0
        stream.close()
        assert list(stream) == []
        stream.close()

    def begun(stream: Any) -> Any:
        # A generator that never began has nothing to end.
        until(lambda: agent.call(1, "made")["items"] > 0, "the first item")
        return stream

    def unread() -> None:
        begun(agent.call(1, name, 10_000)).close()

    def leave_with() -> None:
        with agent.call(1, name, 10_000) as stream:
            assert next(stream) == 0

    def break_and_drop() -> None:
        for item in agent.call(1, name, 10_000):
            if item == 20:
                break

    def drop_without_a_word() -> None:
        begun(agent.call(1, name, 10_000))

    def drop_a_future() -> None:
        begun(agent.call_async(1, name, 10_000).result())

    def drop_a_future_that_nobody_asked() -> None:
        begun(agent.call_async(1, name, 10_000))

    def raise_in_the_loop() -> None:
        def body() -> None:
            for item in agent.call(1, name, 10_000):
                if item == 20:
                    raise RuntimeError("oops")

        assert isinstance(error_of(body), RuntimeError)

    dropped = (drop_without_a_word, drop_a_future, drop_a_future_that_nobody_asked)
    for act in (close, unread, leave_with, break_and_drop, *dropped, raise_in_the_loop):
        ended(act)
    assert agent.call(1, "one") == 1
    assert not agent._connections.callers[1].calls


@pytest.mark.parametrize("name", BOTH)
def test_a_stream_that_nobody_reads_any_more_ends_its_generator(where: str, name: str) -> None:
    run(where, 2, serve, endings, name)


def mistakes(agent: Agent) -> None:
    for name in ("breaks", "breaks_soon"):
        for n in (0, 5, 100):
            got: list[int] = []
            error = error_of(got.extend, agent.call(1, name, n)) if n else error_of(list, agent.call(1, name, n))
            assert isinstance(error, RemoteError)
            assert error.remote_type == "ValueError"
            assert "in the middle" in str(error)
            stream = agent.call(1, name, n)
            for expected in range(n):
                assert next(stream) == expected  # all that came before the error
            assert isinstance(error_of(next, stream), RemoteError)
    stream = agent.call(1, "odd")
    assert next(stream) == 1
    assert isinstance(error_of(next, stream), RemoteError)
    slow = agent.call(1, "count", 2, 3.0, timeout=1.0)
    assert next(slow) == 0
    error = error_of(next, slow)
    assert isinstance(error, Timeout)
    assert "count" in str(error)
    assert "rank 1" in str(error)
    assert list(slow) == []


def test_mistakes_in_the_middle(where: str) -> None:
    run(where, 2, serve, mistakes)


def longer_than_the_timeout(agent: Agent) -> None:
    """Each item has the call's timeout for itself, however the stream was asked for."""
    for stream in (
        agent.call(1, "count", 12, 0.1, timeout=0.6),
        agent.call_async(1, "count", 12, 0.1, timeout=0.6).result(),
        agent.call(1, "count_soon", 12, 0.1, timeout=0.6),
        agent.call(1, "through", 12, timeout=0.6),
    ):
        assert list(stream) == list(range(12))
    assert agent._connections.callers[1]._unattended == 0
    futures = [agent.call_async(1, "one") for _ in range(5)]
    assert [future.result(3) for future in futures] == [1] * 5


def test_a_stream_may_take_longer_than_the_timeout_of_one_item(processes: str) -> None:
    run(processes, 2, serve, longer_than_the_timeout)


def closed_by_another(agent: Agent) -> float:
    stream = agent.call(1, "count", 5, 1.5, timeout=20)
    assert next(stream) == 0
    reader = threading.Thread(target=list, args=(stream,))
    reader.start()
    time.sleep(0.2)
    began = time.monotonic()
    stream.close()
    reader.join(15)
    return time.monotonic() - began


def test_closing_from_another_thread_wakes_the_reader(processes: str) -> None:
    assert run(processes, 2, serve, closed_by_another) < 1.0


def in_a_handler(agent: Agent) -> None:
    agent.register("sums", lambda n: sum(agent.call(1, "count", n)))
    futures = [agent.call_async(0, "sums", 100) for _ in range(10)]
    assert [future.result(10) for future in futures] == [4950] * 10


def test_reading_in_a_handler_holds_no_worker(where: str) -> None:
    run(where, 2, serve, in_a_handler, workers=1)
