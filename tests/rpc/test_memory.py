"""Whose memory it is: what travels is what it was when the call, the handler or the `yield` went on."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
from tests.rpc.support import run

from phalanx.rpc import Agent

SIZE = 8 << 20
"""Bytes that no ring or socket takes at once; if more waited, no other call of this rank would begin."""
DONE = np.ones(1, np.uint8)


# -- results -----------------------------------------------------------------------------------------------------------


def serve_weights(agent: Agent) -> None:
    """A parameter server, whose functions give out the very memory that others change in place."""
    weights = np.zeros(SIZE, np.uint8)
    mutable = bytearray(SIZE)
    agent.register("array", lambda: weights)
    agent.register("a part in a list", lambda: [1, {"part": weights[1:]}])
    agent.register("bytearray", lambda: mutable)

    @agent.register("tensor")
    def tensor() -> Any:
        import torch

        return torch.from_numpy(weights)

    @agent.register("coroutine")
    async def coroutine() -> Any:
        return weights

    @agent.register("items")
    def items() -> Iterator[Any]:
        for _ in range(3):
            yield weights
            weights[:] += 1
        agent._group.send(DONE, 0)

    @agent.register("asynchronous items")
    async def asynchronous_items() -> AsyncIterator[Any]:
        for _ in range(3):
            yield weights
            weights[:] += 1
        agent._group.send(DONE, 0)

    @agent.register("update")
    def update() -> None:
        weights[:] += 1
        mutable[:] = bytes([weights[0]]) * SIZE
        agent._group.send(DONE, 0)

    @agent.register("coroutine's update")
    async def update_soon() -> None:  # it runs beside functions, but not beside other coroutines that do not wait
        update()

    agent.register("now", lambda: int(weights[0]))


def extremes(value: Any) -> list[int]:
    if isinstance(value, list):
        value = value[1]["part"]
    array = np.frombuffer(value, np.uint8) if isinstance(value, bytearray) else np.asarray(value)
    return [int(array.min()), int(array.max())]


def held_up(agent: Agent, name: str) -> tuple[int, Any]:
    """The answer of a call that nobody reads until the server's memory has changed; and what was there before."""
    before = agent.call(1, "now")
    link = agent._connections.callers[1]
    link.mover_lock.acquire()  # whoever has this reads the answers
    try:
        future = agent.call_async(1, name)
        if "items" not in name:
            agent.notify(1, "coroutine's update" if name == "coroutine" else "update")
        agent._group.recv(np.empty(1, np.uint8), 1)
    finally:
        link.hand_over()
    return before, future.result(20)


def results(agent: Agent, names: list[str]) -> None:
    for name in names:
        before, result = held_up(agent, name)
        if "items" in name:
            assert [extremes(item) for item in result] == [[before + n, before + n] for n in range(3)], name
        else:
            assert extremes(result) == [before, before], name


NAMES = ["array", "a part in a list", "bytearray", "coroutine", "items", "asynchronous items"]


def test_a_result_is_what_it_was(stream: str) -> None:
    run(stream, 2, serve_weights, functools.partial(results, names=NAMES), workers=1)


# -- arguments ---------------------------------------------------------------------------------------------------------


def serve_gate(agent: Agent) -> None:
    """A server that reads no further than its queue is long."""
    agent.register("wait", lambda: (agent._group.recv(np.empty(1, np.uint8), 0), None)[1])
    agent.register("extremes", extremes)


def arguments(agent: Agent, how: str) -> None:
    agent.call(1, "extremes", bytearray(1))
    gate = agent.call_async(1, "wait")
    array = np.zeros(3 << 20, np.uint8)
    tensor: Any = array
    if how == "tensor":
        import torch

        tensor = torch.from_numpy(array)
    futures = []
    for number in range(3):
        array[:] = number
        futures.append(agent.call_async(1, "extremes", tensor))
    array[:] = 99
    agent._group.send(DONE, 1)
    gate.result(10)
    assert [future.result(10) for future in futures] == [[number, number] for number in range(3)]
    long = np.zeros(20 << 20, np.uint8)  # longer than what may wait to be sent
    future = agent.call_async(1, "extremes", long)
    long[:] = 99
    assert future.result(10) == [0, 0]


def test_an_argument_is_what_it_was(stream: str) -> None:
    run(stream, 2, serve_gate, functools.partial(arguments, how="array"), workers=1, max_queue=1)


def test_a_tensor_is_what_it_was() -> None:
    pytest.importorskip("torch")
    # Between threads: torch takes seconds to load in each process.
    run("simulated", 2, serve_weights, functools.partial(results, names=["tensor"]), workers=1)
    run("simulated", 2, serve_gate, functools.partial(arguments, how="tensor"), workers=1, max_queue=1)
