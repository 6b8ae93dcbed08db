"""Agents that close: with and without waiting, beside calls, connections and handlers; and what is left of them."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from typing import Any

import pytest
from tests.lateness import bound
from tests.rpc.served import CONTRACT, TRANSPORTS, Watch, outcome, serve, use_everything
from tests.rpc.support import LIMIT, error_of, held, open_rings, run, until, world_of

import phalanx as px
from phalanx import _native, operating_system
from phalanx.errors import Cancelled, ChannelClosed, Closed, PeerLost, PhalanxError
from phalanx.rpc import Agent
from phalanx.testing import run_ranks
from phalanx.transports import duplex_ring


def close_with_drain(world: px.Group) -> Any:
    """Both close while calls run in both directions: all of them are answered."""
    agent = Agent(world, timeout=20)
    serve(agent)
    world.barrier()
    other = 1 - world.rank
    futures = [agent.call_async(other, name, 0.5) for name in ("sleep", "sleep_soon") for _ in range(4)]
    time.sleep(0.2)  # they have arrived
    began = time.monotonic()
    agent.close()
    took = time.monotonic() - began
    return [outcome(future.result, 0) for future in futures], took


def test_close_waits_for_calls_in_both_directions(where: str) -> None:
    for outcomes, took in run_ranks(2, close_with_drain, timeout=20, **world_of(where)):
        assert outcomes == [None] * 4 + [0.5] * 4
        assert took < bound(4)


def close_beside_a_call(world: px.Group) -> Any:
    agent = Agent(world, timeout=20)
    serve(agent)
    world.barrier()
    result = None
    if world.rank == 0:
        watch = Watch()
        watch.start(agent.call, 1, "sleep", 0.3)
        time.sleep(0.1)  # the thread reads the link itself by now
        began = time.monotonic()
        agent.close(timeout=15)
        took = time.monotonic() - began
        watch.join(4)
        result = took, [outcome for _, outcome in watch.ended]
    world.barrier()
    agent.close()
    return result


def test_close_waits_no_longer_than_a_call_of_another_thread(where: str) -> None:
    took, outcomes = run_ranks(2, close_beside_a_call, timeout=40, **world_of(where))[0]
    assert outcomes == [None]
    assert took < bound(4)


def close_without_drain(world: px.Group) -> Any:
    agent = Agent(world, timeout=20, workers=6)  # five of the calls below occupy one
    serve(agent)
    world.barrier()
    watch = Watch()
    other = 1 - world.rank
    if world.rank == 0:
        for _ in range(2):
            watch.start(agent.call, other, "sleep", 2)
            watch.start(agent.call_async(other, "sleep_soon", 2).result)
            watch.start(asyncio.run, agent.acall(other, "sleep", 2))
            watch.start(asyncio.run, agent.acall(other, "sleep_soon", 2))
        stream = agent.call(other, "drip")
        next(stream)
        watch.start(next, stream)
        called: list[Any] = []
        agent.call_async(other, "sleep", 3).add_done_callback(called.append)
        # Its own workers are busy, too: those who wait must be told all the same.
        busy = [agent.call_async(0, "sleep", 2) for _ in range(8)]
        time.sleep(0.4)
        began = time.monotonic()
        agent.close(drain=False)
        closing = time.monotonic() - began
        watch.join(4)
        latest = max(at for at, _ in watch.ended) - began
        assert len(watch.ended) == 9, "some calls were never told"
        assert all(isinstance(error, Cancelled | PhalanxError) for _, error in watch.ended), watch.ended
        until(lambda: called, "the callback of a future", 3)
        assert all(future.done() for future in busy)
        result = closing, latest
    else:
        time.sleep(1.0)
        assert agent.call(1, "echo", 1) == 1
        result = 0.0, 0.0
    world.barrier()
    agent.close(drain=False)
    return result


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_close_without_drain_ends_every_wait(transport: str) -> None:
    results = run_ranks(2, close_without_drain, backend="mesh", options=px.Options(transport=transport), timeout=30)
    closing, latest = results[0]
    assert closing < bound(3)  # its handlers sleep for two seconds
    assert latest < bound(3)


def close_while_another_connects(world: px.Group, rounds: int) -> set[str]:
    """Rank 1 closes a new agent at some moment of the first call to it. Returns the kinds of errors of rank 0."""
    chance = random.Random(7)
    kinds = set()
    for _ in range(rounds):
        agent = Agent(world, timeout=20)
        serve(agent)
        world.barrier()
        if world.rank == 1:
            time.sleep(chance.random() * 4e-3)
            agent.close(drain=False)
        else:
            try:
                assert agent.call(1, "echo", 1) == 1
            except PhalanxError as error:
                kinds.add(f"{type(error).__name__}: {error}" if type(error) is not ChannelClosed else "ChannelClosed")
            agent.close()
        world.barrier()
    until(lambda: not open_rings(), "the memory of all rings to be given back", 5)
    return kinds


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_agent_that_closes_while_another_rank_connects(transport: str) -> None:
    options = px.Options(transport=transport)
    results = run_ranks(2, close_while_another_connects, 120, backend="mesh", options=options, timeout=40)
    assert results[0] == {"ChannelClosed"}


def close_while_a_ring_is_made(world: px.Group) -> Any:
    agent = Agent(world, timeout=20)
    serve(agent)
    world.barrier()
    error = None
    if world.rank == 0:
        error = error_of(agent.call, 1, "echo", 1)
    else:
        make_ring, begun = duplex_ring.make_ring, threading.Event()

        def make_slowly(*args: Any) -> Any:
            begun.set()
            time.sleep(0.2)
            return make_ring(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(duplex_ring, "make_ring", make_slowly)
            was_asked = begun.wait(10)
            agent.close(drain=False)
        assert was_asked
        until(lambda: not open_rings(), "the memory of the ring to be given back", 5)
    world.barrier()
    agent.close()
    return type(error)


@pytest.mark.skipif(not _native.available, reason="only the core has rings (PHALANX_PURE is set)")
def test_an_agent_that_closes_while_it_makes_a_ring() -> None:
    results = run_ranks(2, close_while_a_ring_is_made, backend="mesh", timeout=30)
    assert results[0] is ChannelClosed


def answered_or_told(world: px.Group) -> Any:
    """Rank 1 closes while rank 0 calls on and on: each call is answered or told why not, at once."""
    agent = Agent(world, timeout=20)
    serve(agent)
    world.barrier()
    if world.rank == 1:
        time.sleep(0.3)
        agent.close()
        world.barrier()
        return None
    slowest, answered, error = 0.0, 0, None
    while error is None:
        began = time.monotonic()
        try:
            assert agent.call(1, "echo", answered) == answered
            answered += 1
        except PhalanxError as caught:
            error = caught
        slowest = max(slowest, time.monotonic() - began)
    began = time.monotonic()
    again = error_of(agent.call, 1, "echo", 1)
    slowest = max(slowest, time.monotonic() - began)
    world.barrier()
    agent.close()
    return answered, type(error), type(again), slowest


def test_calls_to_an_agent_that_closes(where: str) -> None:
    answered, error, again, slowest = run_ranks(2, answered_or_told, timeout=20, **world_of(where))[0]
    assert answered > 10
    assert issubclass(error, PeerLost | Cancelled)
    assert issubclass(again, PeerLost | Cancelled)
    assert slowest < bound(CONTRACT)


def notify_and_close(world: px.Group) -> int:
    agent = Agent(world, timeout=20, workers=1)
    hits: list[int] = []
    agent.register("hit", lambda n: (time.sleep(0.001), hits.append(n)))
    world.barrier()
    if world.rank == 0:
        for number in range(300):
            agent.notify(1, "hit", number)
        agent.close()
    else:
        until(lambda: len(hits) == 300, f"all notifications ({len(hits)} came)", 5)
    world.barrier()
    agent.close()
    assert sorted(hits) == sorted(set(hits))
    return len(hits)


def test_notifications_before_close_arrive(where: str) -> None:
    assert run_ranks(2, notify_and_close, timeout=20, **world_of(where))[1] == 300


def close_and_close(agent: Agent) -> None:
    agent.call(0, "echo", 1)
    began = time.monotonic()
    threads = [threading.Thread(target=agent.close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    agent.close()
    agent.close(drain=False)
    assert time.monotonic() - began < bound(3)
    for act in (agent.call, agent.notify, agent.create):
        assert isinstance(error_of(act, 1, "echo", 1), Closed)
    assert isinstance(outcome(lambda: agent.call_async(1, "echo", 1).result()), Closed)
    assert isinstance(outcome(lambda: asyncio.run(agent.acall(1, "echo", 1))), Closed)


def test_close_twice(where: str) -> None:
    run(where, 2, serve, close_and_close)


def serve_bye(agent: Agent) -> None:
    serve(agent)

    def bye() -> None:
        began = time.monotonic()
        agent.close()
        agent.closing_took = time.monotonic() - began  # type: ignore[attr-defined]

    agent.register("bye", bye)


def close_in_a_handler(agent: Agent) -> Any:
    if agent.rank == 0:
        return error_of(agent.call, 1, "bye", timeout=10)
    until(lambda: hasattr(agent, "closing_took"), "the end of the agent")
    return agent.closing_took  # type: ignore[attr-defined]


def test_close_in_a_handler(processes: str) -> None:
    error, took = run(processes, 2, serve_bye, close_in_a_handler, everyone=True)
    assert isinstance(error, PeerLost | Cancelled)
    assert took < bound(3)


def drain_ends(agent: Agent) -> float:
    future = agent.call_async(1, "sleep", 1.0)
    began = time.monotonic()
    agent.close(timeout=0.3)
    took = time.monotonic() - began
    assert isinstance(outcome(future.result, 1), PhalanxError)
    return took


def test_draining_has_an_end(where: str) -> None:
    assert 0.2 < run(where, 2, serve, drain_ends) < 0.9


def serve_stuck(agent: Agent) -> None:
    agent.released = threading.Event()  # type: ignore[attr-defined]
    agent.register("stuck", agent.released.wait)  # type: ignore[attr-defined]


def close_beside_stuck_handlers(agent: Agent) -> float:
    if agent.rank == 0:
        futures = [agent.call_async(1, "stuck", LIMIT, timeout=LIMIT) for _ in range(3)]
        return float(all(isinstance(future.exception(LIMIT), PhalanxError) for future in futures))
    until(lambda: agent._poller.running == 3, "the handlers")
    began = time.monotonic()
    agent.close(timeout=0.3)
    took = time.monotonic() - began
    agent.released.set()  # type: ignore[attr-defined]
    return took


def test_closing_does_not_wait_for_stuck_handlers(where: str) -> None:
    failed, took = run(where, 2, serve_stuck, close_beside_stuck_handlers, everyone=True)
    assert failed
    assert 0.2 < took < bound(1)


# -- what is left ----------------------------------------------------------------------------------------------------


def leave(world: px.Group, how: str, rounds: int) -> float:
    slowest = 0.0
    before: dict[str, int] = {}

    def ended(own: int) -> bool:
        """Whether the agent's threads are gone, and with them all but `own` descriptors that it held."""
        if any(thread.name.startswith("phalanx-rpc") for thread in threading.enumerate()):
            return False
        now = held()
        return not before or all(now[kind] <= before[kind] + own * (kind == "descriptors") for kind in now)

    def once() -> None:
        nonlocal slowest
        agent = Agent(world, timeout=10)
        serve(agent)
        world.barrier()
        use_everything(agent)
        world.barrier()
        began = time.monotonic()
        own = 0
        if how == "drop":
            del agent
            gc.collect()
        else:
            agent.close(drain=how == "drain")
            # What wakes its threads goes with the agent, which this function still holds. A pipe has two ends.
            own = 1 if operating_system.LINUX else 2
        # The agent's own thread ends a dropped one. And also one that was joined is the system's for a moment longer.
        until(lambda: ended(own), f"an agent to end: {before} before, {held()} now", 5)
        slowest = max(slowest, time.monotonic() - began)

    once()
    world.barrier()
    before = held()
    for _ in range(rounds):
        once()
    world.barrier()
    until(lambda: ended(0), f"all agents to end: {before} before, {held()} now", 5)
    return slowest


@pytest.mark.parametrize("how", ["drain", "no drain", "drop"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nothing_is_left(transport: str, how: str) -> None:
    options = px.Options(transport=transport)
    slowest = max(run_ranks(2, leave, how, 8, backend="mesh", options=options, timeout=40))
    assert slowest < bound(2), "a thread did not end when it was told"


def open_and_close(world: px.Group, rounds: int) -> float:
    """An agent that was just made, or is just idle, ends as soon as it is told."""
    slowest = 0.0
    for number in range(rounds):
        agent = Agent(world)
        agent.register("echo", lambda x: x)
        if number % 3:
            agent.call(0, "echo", 1)
        if number % 3 == 2:
            agent.call_async(0, "echo", 1).result()
        began = time.monotonic()
        agent.close()
        slowest = max(slowest, time.monotonic() - began)
    return slowest


def test_a_thousand_agents() -> None:
    assert run_ranks(1, open_and_close, 1000, backend="mesh", timeout=60)[0] < 1.0
