"""Callbacks of futures: they run in a thread of the agent, and may call, and wait for what they called."""

from __future__ import annotations

import concurrent.futures
import threading
from typing import Any

import pytest
from tests.rpc.support import run, until

from phalanx.errors import RemoteError
from phalanx.rpc import Agent


def serve(agent: Agent) -> None:
    agent.register("add", lambda a, b: a + b)

    def fail(words: str) -> None:
        raise ValueError(words)

    agent.register("fail", fail)


def callbacks(agent: Agent) -> None:
    """A chain of calls, each made by the callback of the one before it."""
    results: list[Any] = []
    done = threading.Event()

    def more(future: concurrent.futures.Future[Any]) -> None:
        value = future.result()
        results.append(value)
        if value >= 50:
            done.set()
        elif value % 2:
            agent.call_async(1, "add", value, 1).add_done_callback(more)
        else:  # it may even wait
            following: concurrent.futures.Future[Any] = concurrent.futures.Future()
            following.add_done_callback(more)
            following.set_result(agent.call(1, "add", value, 1))

    agent.call_async(1, "add", 0, 1).add_done_callback(more)
    assert done.wait(20)
    assert results == list(range(1, 51))
    failed: list[Any] = []
    future = agent.call_async(1, "fail", "oops")
    future.add_done_callback(lambda future: failed.append(future.exception()))
    assert isinstance(future.exception(5), RemoteError)
    until(lambda: failed, "the callback")
    assert failed[0] is future.exception()
    many = [agent.call_async(1, "add", number, 0) for number in range(100)]
    assert {future.result() for future in concurrent.futures.as_completed(many, 10)} == set(range(100))
    finished, unfinished = concurrent.futures.wait([agent.call_async(1, "add", 1, 1) for _ in range(50)], 10)
    assert (len(finished), len(unfinished)) == (50, 0)


@pytest.mark.parametrize("workers", [1, 8])
def test_callbacks_that_call_again(where: str, workers: int) -> None:
    run(where, 2, serve, callbacks, workers=workers)


def of_both(agent: Agent, count: int, way: str) -> int:
    """Each rank has so many callbacks that wait for the other: then all their threads do."""
    other, sums, lock = 1 - agent.rank, [], threading.Lock()

    def again(future: concurrent.futures.Future[Any]) -> None:
        value = future.result()
        total = (
            agent.call(other, "add", value, 1) if way == "call" else agent.call_async(other, "add", value, 1).result()
        )
        with lock:
            sums.append(total)

    for done in range(1, 21):
        for number in range(count):
            agent.call_async(other, "add", number, number, timeout=20).add_done_callback(again)
        until(lambda done=done: len(sums) == count * done, "the callbacks")  # type: ignore[misc]
    return sum(sums)


@pytest.mark.parametrize("way", ["call", "call_async"])
@pytest.mark.parametrize(("workers", "count"), [(1, 1), (2, 9), (8, 16)])
def test_callbacks_of_both_ranks_that_wait_for_each_other(where: str, workers: int, count: int, way: str) -> None:
    """What waits for a call of its own does not count as running: else no thread would serve the other rank's."""
    each = 20 * sum(2 * number + 1 for number in range(count))
    assert run(where, 2, serve, of_both, count, way, everyone=True, workers=workers) == [each, each]
