"""Remote calls: how they are made, to whom, many at once, in each other, and what goes wrong."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import threading
import time
from typing import Any

import numpy as np
import pytest
from tests.lateness import bound
from tests.rpc.support import at_once, error_of, request, run, until

import phalanx as px
from phalanx.errors import Cancelled, FunctionNotFound, InvalidArgument, InvalidRank, RemoteError, Timeout, UsageError
from phalanx.rpc import Agent, current_call, time_left
from phalanx.wire.calls import CallKind

FEW = ["star", "classic mesh", "pure", "subgroup", "sub-backend"]
"""Worlds that only some tests run in."""


def add(a: int, b: int = 10) -> int:
    return a + b


def echo(x: Any) -> Any:
    return x


def fail(words: str) -> None:
    raise ValueError(words)


def sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


async def add_soon(a: int, b: int) -> int:
    await asyncio.sleep(0.01)
    return a + b


async def fail_soon(words: str) -> None:
    await asyncio.sleep(0)
    raise KeyError(words)


def serve(agent: Agent) -> None:
    for function in (add, echo, fail, sleep, add_soon, fail_soon, time_left):
        agent.register(function)
    agent.register("who", lambda: (agent.rank, current_call().caller))  # type: ignore[union-attr]


# -- the ways to call ------------------------------------------------------------------------------------------------


def all_ways(agent: Agent) -> None:
    noted: list[int] = []
    agent.register("note", noted.append)
    for dst in range(agent.world_size):
        assert agent.call(dst, "add", 2, 3) == 5
        assert agent.call(dst, "add", 2) == 12
        assert agent.call(dst, "add", b=1, a=2) == 3
        assert agent.call(dst, "add_soon", 2, 3, timeout=5) == 5
        assert agent.call_async(dst, "add", 2, b=3).result(5) == 5
        assert agent.call_async(dst, "add_soon", 2, 3).result() == 5
        assert agent.call(dst, "who") == (dst, agent.rank)
        assert asyncio.run(agent.acall(dst, "add", 2, 3)) == 5
        assert asyncio.run(agent.acall(dst, "add_soon", 2, b=3)) == 5
    agent.notify(agent.rank, "note", 7)
    until(lambda: noted == [7], "a notification of this rank")


@pytest.mark.parametrize("kind", ["rings", "tcp", "simulated", *FEW])
def test_every_way_to_every_rank(kind: str) -> None:
    size = 2 if kind == "star" else 3  # on the star only rank 0 has a connection to everybody
    run(kind, size, serve, all_ways, everyone=True)


def test_with_tls(tls: px.TlsOptions) -> None:
    run("tcp", 2, serve, all_ways, everyone=True, options=px.Options(tls=tls))


def serve_two_links(agent: Agent) -> None:
    noted = threading.Event()
    agent.register("echo", lambda x: x)
    agent.register("note", lambda: agent._group.send(np.ones(1), 0) if agent.rank else noted.set())
    agent.register("noted", lambda: noted.wait(10))
    agent.call(agent.rank, "echo", 1)  # a second link: an agent that has only one reads on by itself


def behind_an_array(agent: Agent) -> None:
    agent.call(1, "echo", 1)
    number = 1 << 40
    frames = [
        request(number, "echo", np.ones(10), kind=CallKind.NOTIFY),
        request(number + 1, "note", kind=CallKind.NOTIFY),
    ]
    for dst in (1, 0):
        time.sleep(0.01)  # all is quiet, and nothing else will come on that link
        assert agent._connections.callers[dst].pipe.send_rest([b"".join(frames)]) == sum(map(len, frames))
        if dst:
            agent._group.recv(np.empty(1), dst, timeout=10)
        else:
            assert agent._registry.function("noted").call()


def test_a_frame_that_was_read_ahead_behind_an_array_is_not_forgotten(stream: str) -> None:
    run(stream, 2, serve_two_links, behind_an_array)


def on_the_star(agent: Agent) -> Any:
    if agent.rank == 0:
        return [agent.call(dst, "add", dst, 1) for dst in range(agent.world_size)]
    other = error_of(agent.call, 3 - agent.rank, "add", 1, 1)
    return agent.call(0, "add", agent.rank, 1), type(other)


def test_the_star_has_connections_with_rank_0_only() -> None:
    assert run("star", 3, serve, on_the_star, everyone=True) == [
        [1, 2, 3],
        (2, px.RpcNoConnection),
        (3, px.RpcNoConnection),
    ]


def register_every_form(agent: Agent) -> None:
    @agent.register
    def plain() -> str:
        return "plain"

    @agent.register("with a name")
    def _named() -> str:
        return "named"

    assert agent.register("both", functools.partial(add, 1))(2) == 3
    agent.register("method", Shelf(5).get)
    agent.register("lambda", lambda *items, **named: [list(items), named])


def call_every_form(agent: Agent) -> None:
    assert agent.call(1, "plain") == "plain"
    assert agent.call(1, "with a name") == "named"
    assert agent.call(1, "both", 4) == 5
    assert agent.call(1, "method") == 5
    assert agent.call(1, "lambda", 1, 2, a=3) == [[1, 2], {"a": 3}]
    assert agent.call(0, "plain") == "plain"
    agent.unregister("plain")
    gone = error_of(agent.call, 0, "plain")
    assert isinstance(gone, FunctionNotFound)
    assert "plain" in str(gone)
    assert agent.call(1, "plain") == "plain"
    with pytest.raises(FunctionNotFound):
        agent.unregister("plain")
    with pytest.raises(UsageError, match="registered already"):
        agent.register("both", add)
    with pytest.raises(UsageError, match="cannot be called"):
        agent.register("number", 5)  # type: ignore[type-var]
    with pytest.raises(UsageError, match="name"):
        agent.register("", add)
    with pytest.raises(UsageError, match="a name is needed"):
        agent.register(functools.partial(add, 1))
    agent.register("both again", add)
    agent.register("both again", add)  # the same thing twice is no mistake


class Shelf:
    def __init__(self, item: Any) -> None:
        self.item = item

    def get(self) -> Any:
        return self.item


def test_every_form_of_register(where: str) -> None:
    run(where, 2, register_every_form, call_every_form)


@pytest.mark.parametrize(
    "arguments",
    [{"workers": 0}, {"max_message": -1}, {"max_in_flight": 1.5}, {"max_queue": True}, {"timeout": -1}],
)
def test_arguments_of_an_agent(arguments: dict[str, Any]) -> None:
    (backend,) = px.backends.SimulatedBackend.create_group(1)
    with px.Group(backend) as group, pytest.raises(UsageError, match=next(iter(arguments))):
        Agent(group, **arguments)


def alone(agent: Agent) -> None:
    assert agent.call(0, "add", 1, 2) == 3
    for wrong in (-1, 1, 99):
        assert isinstance(error_of(agent.call, wrong, "add", 1, 2), InvalidRank), wrong


def test_a_world_of_one(where: str) -> None:
    run(where, 1, serve, alone)


# -- many at once ----------------------------------------------------------------------------------------------------


def many_both_ways(agent: Agent, rounds: int) -> None:
    peers = range(agent.world_size)
    futures = [(number, agent.call_async(number % 3, "add", number, agent.rank)) for number in range(150)]
    results = at_once(8, lambda thread: [agent.call(dst, "add", thread, n) - n for n in range(rounds) for dst in peers])
    assert results == [[thread] * 3 * rounds for thread in range(8)]
    assert [future.result(20) - agent.rank for _, future in futures] == list(range(150))


def test_many_at_once_both_ways(where: str) -> None:
    run(where, 3, serve, many_both_ways, 8 if where == "simulated" else 30, everyone=True)


async def gather_many(agent: Agent) -> list[int]:
    return await asyncio.gather(*(agent.acall(n % 2, "add_soon", n, 0) for n in range(200)))


def test_many_coroutines(where: str) -> None:
    started = time.monotonic()
    assert run(where, 2, serve, lambda agent: asyncio.run(gather_many(agent))) == list(range(200))
    assert time.monotonic() - started < bound(15)


def in_bursts(agent: Agent) -> list[str]:
    """Some threads wait for one link; the answers of all but one come at the same time."""
    worst = []
    for late in range(20):
        results = at_once(4, lambda number, late=late: agent.call(1, "burst", number, late % 4, timeout=4), 10)
        worst += [str(result) for number, result in enumerate(results) if result != number]
    return worst


def serve_bursts(agent: Agent) -> None:
    waiting: list[asyncio.Event] = []

    async def burst(number: int, late: int) -> int:
        waiting.append(asyncio.Event())
        if len(waiting) == 4:
            for event in waiting:
                event.set()
            waiting.clear()
        else:
            await waiting[-1].wait()
        if number == late:
            await asyncio.sleep(0.01)
        return number

    agent.register(burst)


def test_who_waits_is_never_forgotten(where: str) -> None:
    """A thread that had its answer may be asked to read for the others just when it leaves."""
    assert run(where, 2, serve_bursts, in_bursts) == []


def beside_a_long_call(agent: Agent) -> list[float]:
    agent.call(1, "echo", 0)
    long = threading.Thread(target=agent.call, args=(1, "sleep", 1.5))
    long.start()
    time.sleep(0.1)
    times = []
    big = np.zeros(12 << 20, np.uint8)
    for act in (
        lambda: agent.notify(1, "echo", big),
        lambda: agent.call(1, "echo", big, timeout=5),
        lambda: agent.call_async(1, "echo", big).result(5),
    ):
        began = time.monotonic()
        act()
        times.append(time.monotonic() - began)
    long.join()
    return times


def test_a_long_call_does_not_hold_up_others(processes: str) -> None:
    """The thread of a long call moves the bytes of its link for everybody, and must tell them when theirs are sent."""
    assert max(run(processes, 2, serve, beside_a_long_call)) < 1.0


# -- nesting ---------------------------------------------------------------------------------------------------------


def serve_down(agent: Agent) -> None:
    def down(depth: int) -> int:
        return 0 if depth == 0 else 1 + agent.call((agent.rank + 1) % agent.world_size, "down", depth - 1)

    async def down_soon(depth: int) -> int:
        if depth == 0:
            return 0
        return 1 + await agent.acall((agent.rank + 1) % agent.world_size, "down_soon", depth - 1)

    def down_future(depth: int) -> int:
        if depth == 0:
            return 0
        future = agent.call_async((agent.rank + 1) % agent.world_size, "down_future", depth - 1)
        return 1 + int(future.result())

    for function in (down, down_soon, down_future):
        agent.register(function)


def chains(agent: Agent, name: str, count: int) -> list[Any]:
    assert agent.call(1, name, 30) == 30
    futures = [agent.call_async(1, name, 30, timeout=20) for _ in range(count)]
    return [future.exception() or future.result() for future in futures]


@pytest.mark.parametrize("name", ["down", "down_soon", "down_future"])
@pytest.mark.parametrize("kind", ["rings", "tcp"])
def test_fifty_chains_there_and_back_thirty_deep(kind: str, name: str) -> None:
    """Handlers that wait for calls of their own hold no worker: two of them are enough for 1,500 that wait."""
    assert run(kind, 2, serve_down, chains, name, 50, workers=2) == [30] * 50


def test_chains_between_threads() -> None:
    assert run("simulated", 3, serve_down, chains, "down", 5, workers=2) == [30] * 5


# -- errors ----------------------------------------------------------------------------------------------------------


class Odd:
    pass


def errors(agent: Agent) -> None:
    missing = error_of(agent.call, 1, "nothing")
    assert isinstance(missing, FunctionNotFound)
    assert "nothing" in str(missing)
    assert "rank 1" in str(missing)
    assert "add" in str(missing)
    assert missing.peer == 1
    for args, kwargs in (((), {}), ((1, 2, 3), {}), ((1,), {"c": 2}), (("1",), {})):
        wrong = error_of(agent.call, 1, "add", *args, **kwargs)
        assert isinstance(wrong, InvalidArgument), wrong
        assert isinstance(wrong, TypeError)
        assert "add" in str(wrong)
    for name, type_name in (("fail", "ValueError"), ("fail_soon", "KeyError")):
        for error in (
            error_of(agent.call, 1, name, "some words é"),
            agent.call_async(1, name, "some words é").exception(),
        ):
            assert isinstance(error, RemoteError)
            assert error.remote_type == type_name
            assert "some words é" in str(error)
            assert "rank 1" in str(error)
            assert error.remote_traceback is not None
            assert f"in {name}" in error.remote_traceback
            assert "test_calls.py" in error.remote_traceback
            assert error.peer == 1
            assert error.operation == name
    long = error_of(agent.call, 1, "fail", "x" * 1_000_000)
    assert isinstance(long, RemoteError)
    assert len(str(long)) < 300_000
    assert isinstance(error_of(agent.call, 1, "fail", "\ud800"), RemoteError)
    for unsendable in (Odd(), object(), lambda: 1, [1, {"a": Odd()}], np.array([Odd()], object), {Odd(): 1}):
        for act in (agent.call, agent.call_async, agent.notify):
            error = error_of(act, 1, "echo", unsendable)
            assert isinstance(error, UsageError), (unsendable, error)
            assert "echo" in str(error)
    for name in ("", "x" * 2000):
        assert isinstance(error_of(agent.call, 1, name), UsageError)
    for seconds in (-1, float("nan"), float("inf"), "1"):
        assert isinstance(error_of(agent.call, 1, "add", 1, timeout=seconds), UsageError), seconds
    result = error_of(agent.call, 1, "unsendable")
    assert isinstance(result, RemoteError)
    assert "unsendable" in str(result)
    assert agent.call(1, "add", 1, 2) == 3


def serve_errors(agent: Agent) -> None:
    serve(agent)
    agent.register("unsendable", lambda: [1, Odd()])


def test_errors(where: str) -> None:
    run(where, 2, serve_errors, errors)


def too_long(agent: Agent) -> None:
    for argument in (np.zeros(100_001, np.uint8), "x" * 100_001, b"x" * 100_001):
        for act in (agent.call, agent.call_async, agent.notify):
            error = error_of(act, 1, "echo", argument)
            assert isinstance(error, UsageError)
            assert "100000" in str(error)
    big = error_of(agent.call, 1, "zeros", 200_000)
    assert isinstance(big, RemoteError)
    assert "100000" in str(big)
    assert len(agent.call(1, "zeros", 90_000)) == 90_000
    assert agent.call(1, "echo", "x" * 90_000) == "x" * 90_000


def serve_zeros(agent: Agent) -> None:
    serve(agent)
    agent.register("zeros", lambda size: bytes(size))


def test_too_long(where: str) -> None:
    run(where, 2, serve_zeros, too_long, max_message=100_000)


# -- deadlines -------------------------------------------------------------------------------------------------------


def deadlines(agent: Agent) -> None:
    for act in (
        lambda: agent.call(1, "sleep", 0.5, timeout=0.1),
        lambda: agent.call_async(1, "sleep", 0.5, timeout=0.1).result(),
        lambda: asyncio.run(agent.acall(1, "sleep", 0.5, timeout=0.1)),
    ):
        began = time.monotonic()
        error = error_of(act)
        assert 0.05 < time.monotonic() - began < bound(0.45)
        assert isinstance(error, Timeout), error
        assert "rank 1" in str(error)
        assert "sleep" in str(error)
        assert error.peer == 1
        assert error.missing == (1,) or list(error.missing) == [1]
    assert 1.0 < agent.call(1, "time_left", timeout=2.0) <= 2.0
    assert isinstance(error_of(agent.call, 1, "add", 1, timeout=0.0), Timeout)
    assert time_left() is None
    assert agent.call(1, "add", 1, 2, timeout=1e12) == 3  # as good as for ever
    future = agent.call_async(1, "sleep", 0.3)
    assert isinstance(error_of(future.result, 0.05), concurrent.futures.TimeoutError)
    assert future.result(2) == 0.3


def test_deadlines(where: str) -> None:
    run(where, 2, serve, deadlines)


def relay_deadlines(agent: Agent) -> list[list[float]]:
    """What is left in a handler on rank 2, called by one on rank 1 with 50 s; the first call opens the connection."""
    return [[agent.call(1, name, timeout=2.0) for _ in range(2)] for name in ("relay", "relay_soon", "relay_async")]


def serve_relay(agent: Agent) -> None:
    serve(agent)

    def relay() -> float:
        return agent.call(2, "time_left", timeout=50.0)  # type: ignore[no-any-return]

    async def relay_soon() -> float:
        return await agent.acall(2, "time_left", timeout=50.0)  # type: ignore[no-any-return]

    def relay_async() -> float:
        return agent.call_async(2, "time_left", timeout=50.0).result()  # type: ignore[no-any-return]

    for function in (relay, relay_soon, relay_async):
        agent.register(function)


@pytest.mark.parametrize("first", ["relay", "relay_soon", "relay_async"])
def test_nested_deadlines_are_never_longer_than_the_callers(processes: str, first: str) -> None:
    left = run(processes, 3, serve_relay, lambda agent: agent.call(1, first, timeout=2.0))
    assert 1.0 < left <= 2.0


def test_nested_deadlines_over_an_open_connection(where: str) -> None:
    for pair in run(where, 3, serve_relay, relay_deadlines):
        assert 1.0 < pair[1] <= 2.0


def nested_gives_up(agent: Agent) -> list[float]:
    """The caller of a handler that waits for a third rank gives up: that rank is told, too."""
    future = agent.call_async(1, "through", timeout=20.0)
    until(lambda: agent.call(2, "state")[0] == 1, "the handler on rank 2")
    began = time.monotonic()
    assert future.cancel()
    until(lambda: agent.call(2, "state")[1] == 1, "its end")
    return [time.monotonic() - began, *agent.call(1, "ended")]


def serve_through(agent: Agent) -> None:
    state = [0, 0]
    ended: list[str] = []
    agent.register("state", lambda: state)
    agent.register("ended", lambda: (until(lambda: ended, "the handler in between"), ended)[1])

    def wait() -> None:
        state[0] += 1
        context = current_call()
        assert context is not None
        until(lambda: context.cancelled, "the word that nobody waits")
        state[1] += 1

    def through() -> None:
        try:
            agent.call(2, "wait", timeout=30.0)
        except Cancelled:
            ended.append("Cancelled")
            raise

    agent.register(wait)
    agent.register(through)


def test_giving_up_goes_through(where: str) -> None:
    seconds, how = run(where, 3, serve_through, nested_gives_up)
    assert seconds < bound(1.0)
    assert how == "Cancelled"
