"""What goes wrong: ranks that die, worlds that end, agents that close, forks and interrupts. Nothing hangs."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

import numpy as np
import pytest
from tests.lateness import bound
from tests.rpc.support import LIMIT, WORLDS, at_once, error_of, held, open_rings, run, until

import phalanx as px
from phalanx import _native, operating_system
from phalanx.deadline import Deadline
from phalanx.errors import Cancelled, ChannelClosed, Closed, PeerLost, PhalanxError, ProtocolError, Timeout
from phalanx.rpc import Agent, current_call
from phalanx.rpc.caller import CallerLink
from phalanx.rpc.connect import Connections
from phalanx.rpc.link import Frame
from phalanx.rpc.pending_call import PendingCall
from phalanx.testing import run_ranks
from phalanx.transports import duplex_ring
from phalanx.wire.calls import CallKind

CONTRACT = 1.0
"""Seconds within which the loss of a rank is noticed."""
TRANSPORTS = ["auto", "tcp"]


def serve(agent: Agent) -> None:
    agent.register("echo", lambda x: x)
    agent.register("sleep", time.sleep)
    agent.register("pid", os.getpid)
    agent.register("count", lambda n: (number for number in range(n)))
    agent.register(Thing)

    async def sleep_soon(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    def drip() -> Iterator[int]:
        yield 1
        context = current_call()
        assert context is not None
        while not context.cancelled:
            time.sleep(0.02)

    agent.register(sleep_soon)
    agent.register(drip)


class Thing:
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class Watch:
    """Calls in threads of their own, and when and how each of them ended."""

    def __init__(self) -> None:
        self.ended: list[tuple[float, BaseException | None]] = []
        self._threads: list[threading.Thread] = []

    def start(self, act: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        def body() -> None:
            try:
                act(*args, **kwargs)
                error = None
            except BaseException as caught:
                error = caught
            self.ended.append((time.monotonic(), error))

        self._threads.append(threading.Thread(target=body, daemon=True))
        self._threads[-1].start()

    def join(self, seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def latest(self, expected: type[BaseException], peer: int) -> float:
        """When the last of them ended, if all did so in the right way."""
        assert len(self.ended) == len(self._threads), "some have not ended"
        for _, error in self.ended:
            assert isinstance(error, expected), repr(error)
            assert getattr(error, "peer", None) == peer, repr(error)
        return max(at for at, _ in self.ended)


# -- a rank that dies ------------------------------------------------------------------------------------------------


def killed_under_load(world: px.Group, victim: int) -> Any:
    agent = Agent(world, timeout=20, workers=32)
    serve(agent)
    loaded = threading.Semaphore(0)
    agent.register("loaded", loaded.release)
    world.barrier()
    pids = world.all_gather_object(os.getpid())
    if world.rank == victim:
        time.sleep(30)
    survivors = [rank for rank in range(world.world_size) if rank != victim]
    watch = Watch()
    thing = agent.create(victim, "Thing")
    stream = agent.call(victim, "drip")
    assert next(stream) == 1
    for _ in range(2):
        watch.start(agent.call, victim, "sleep", 15)
        watch.start(agent.call, victim, "sleep_soon", 15)
        watch.start(agent.call_async(victim, "sleep", 15).result)
    watch.start(asyncio.run, agent.acall(victim, "sleep", 15))
    watch.start(thing.sleep, 15)
    watch.start(next, stream)

    def flood() -> None:
        while True:
            agent.notify(victim, "echo", b"x" * 1000)

    def load() -> None:
        while True:
            agent.call(victim, "echo", np.zeros(20_000))

    watch.start(flood)
    watch.start(load)
    slowest = [0.0]
    stop = threading.Event()

    def others() -> int:
        done = 0
        while not stop.is_set():
            for rank in survivors:
                began = time.monotonic()
                assert agent.call(rank, "echo", done, timeout=5) == done
                slowest[0] = max(slowest[0], time.monotonic() - began)
                done += 1
        return done

    going_on: list[Any] = []
    other = threading.Thread(target=lambda: going_on.append(_outcome(others)))
    other.start()
    time.sleep(0.5)
    agent.notify(survivors[0], "loaded")
    killed_at = None
    if world.rank == survivors[0]:
        assert all(loaded.acquire(timeout=10) for _ in survivors)
        killed_at = time.monotonic()  # the clock is the same for all processes
        os.kill(pids[victim], signal.SIGKILL)
    watch.join()
    latest = watch.latest(PeerLost, victim)
    time.sleep(0.2)
    stop.set()
    other.join()
    began = time.monotonic()
    again = error_of(agent.call, victim, "echo", 1)
    assert isinstance(again, PeerLost)
    assert time.monotonic() - began < bound(0.5)
    for rank in survivors:
        assert agent.call(rank, "echo", 5) == 5
    # The group is broken, so the survivors wait for each other by calls.
    agent.register("done", lambda: True)
    for rank in survivors:
        until(lambda rank=rank: _outcome(agent.call, rank, "done") is True, f"rank {rank}")
    time.sleep(0.3)
    agent.close()
    return killed_at, latest, going_on[0], slowest[0]


def _outcome(act: Callable[..., Any], *args: Any) -> Any:
    try:
        return act(*args)
    except Exception as error:
        return error


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_killed_under_load(transport: str) -> None:
    options = px.Options(transport=transport)
    results = run_ranks(3, killed_under_load, 1, backend="mesh", may_die=[1], options=options, timeout=40)
    killed_at = results[0][0]
    for rank in (0, 2):
        _, latest, done, slowest = results[rank]
        assert latest - killed_at < bound(CONTRACT), f"rank {rank} noticed after {latest - killed_at:.3f} s"
        assert isinstance(done, int), f"a call to a survivor failed: {done!r}"
        assert done > 20
        assert slowest < bound(CONTRACT)


def killed_while_it_calls(world: px.Group) -> Any:
    """The handlers of a caller that dies see it; what it had queued is not begun."""
    agent = Agent(world, workers=1)
    seen: list[str] = []

    def work() -> None:
        context = current_call()
        assert context is not None
        seen.append("begun")
        until(lambda: context.cancelled, "the word that the caller is gone", 5.0)
        seen.append("saw it")

    agent.register(work)
    world.barrier()
    if world.rank == 0:
        for _ in range(5):
            agent.call_async(1, "work", timeout=20)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    until(lambda: "saw it" in seen, "the handler")
    time.sleep(0.3)
    agent.close()
    return seen


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_handlers_see_that_their_caller_died(transport: str) -> None:
    options = px.Options(transport=transport)
    results = run_ranks(2, killed_while_it_calls, backend="mesh", may_die=[0], options=options, timeout=20)
    assert results[1] == ["begun", "saw it"]


def killed_during_the_first_call(world: px.Group) -> Any:
    """It dies while the others are about to connect to it."""
    agent = Agent(world, timeout=10)
    serve(agent)
    world.barrier()
    through = np.zeros(1)
    if world.rank == 0:
        for rank in (1, 2):
            world.recv(through, rank)  # not before they have left the barrier
        time.sleep(0.01 * random.random())
        os.kill(os.getpid(), signal.SIGKILL)
    world.send(through, 0)
    began = time.monotonic()
    while True:
        error = _outcome(agent.call, 0, "echo", 1)
        if isinstance(error, BaseException):
            break
    took = time.monotonic() - began
    time.sleep(0.2)
    other = agent.call(3 - world.rank, "echo", 5)
    time.sleep(0.3)
    agent.close()
    return type(error), took, other


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_killed_while_others_connect(transport: str) -> None:
    options = px.Options(transport=transport)
    for _ in range(3):
        results = run_ranks(3, killed_during_the_first_call, backend="mesh", may_die=[0], options=options, timeout=20)
        for error, took, other in results[1:]:
            assert issubclass(error, PeerLost)
            assert took < bound(CONTRACT + 0.1)
            assert other == 5


# -- a world that ends -----------------------------------------------------------------------------------------------


def aborted(world: px.Group) -> Any:
    agent = Agent(world, timeout=20)
    serve(agent)
    world.barrier()
    watch = Watch()
    for dst in range(3):
        watch.start(agent.call, dst, "sleep", 1.5)
        watch.start(agent.call_async(dst, "sleep_soon", 1.5).result)
    time.sleep(0.5)
    began = time.monotonic()
    if world.rank == 1:
        world.abort("enough")
    watch.join()
    latest = max(at for at, _ in watch.ended) - began
    errors = [error for _, error in watch.ended]
    assert len(errors) == 6
    assert all(isinstance(error, PhalanxError) for error in errors), errors
    after = error_of(agent.call, (world.rank + 1) % 3, "echo", 1)
    assert isinstance(after, PhalanxError)
    began = time.monotonic()
    with contextlib.suppress(PhalanxError):
        agent.close(drain=False)
    return latest, sum("enough" in str(error) for error in errors), time.monotonic() - began


def _world(where: str) -> dict[str, Any]:
    """The arguments of `run_ranks` for a kind of world."""
    backend, arguments = WORLDS[where]
    return {"backend": backend, **arguments}


def test_the_world_is_aborted(where: str) -> None:
    """A classic world is not among them: it has nobody who could tell third ranks."""
    for rank, (latest, named, closing) in enumerate(run_ranks(3, aborted, timeout=30, **_world(where))):
        assert latest < bound(CONTRACT), (rank, latest)
        assert named >= 4, f"rank {rank} is not told why"  # a call to itself need not be
        assert closing < bound(3)


def world_closed_first(world: px.Group) -> Any:
    agent = Agent(world, timeout=5)
    serve(agent)
    world.barrier()
    agent.call((world.rank + 1) % 2, "echo", 1)
    world.barrier()
    before = held()["threads"]
    world.close()
    error = error_of(agent.call, (world.rank + 1) % 2, "echo", 1)
    agent.close()
    until(lambda: held()["threads"] < before, "the agent's threads")
    return type(error)


@pytest.mark.parametrize("kind", ["mesh", "simulated"])
def test_a_world_that_is_closed_before_its_agent(kind: str) -> None:
    for error in run_ranks(2, world_closed_first, backend=kind, timeout=20):
        assert issubclass(error, Closed | PeerLost)


# -- agents that close -----------------------------------------------------------------------------------------------


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
    return [_outcome(future.result, 0) for future in futures], took


def test_close_waits_for_calls_in_both_directions(where: str) -> None:
    for outcomes, took in run_ranks(2, close_with_drain, timeout=20, **_world(where)):
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
    took, outcomes = run_ranks(2, close_beside_a_call, timeout=40, **_world(where))[0]
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
    answered, error, again, slowest = run_ranks(2, answered_or_told, timeout=20, **_world(where))[0]
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
    assert run_ranks(2, notify_and_close, timeout=20, **_world(where))[1] == 300


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
    assert isinstance(_outcome(lambda: agent.call_async(1, "echo", 1).result()), Closed)
    assert isinstance(_outcome(lambda: asyncio.run(agent.acall(1, "echo", 1))), Closed)


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
    assert isinstance(_outcome(future.result, 1), PhalanxError)
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


def use_everything(agent: Agent) -> None:
    for dst in range(agent.world_size):
        assert agent.call(dst, "echo", 1) == 1
        assert agent.call_async(dst, "sleep_soon", 0.001).result() == 0.001
        assert asyncio.run(agent.acall(dst, "echo", 2)) == 2
        assert sum(agent.call(dst, "count", 40)) == 780
        agent.create(dst, "Thing").sleep(0.001)
        agent.call(dst, "echo", np.zeros(100_000))
        agent.notify(dst, "sleep", 0.003)


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


# -- many threads ----------------------------------------------------------------------------------------------------


def threads_of_a_lost_rank(agent: Agent) -> list[float]:
    """No connection can be made, and that takes a moment to find out: all threads hear of it then."""

    def dial(_dst: int, _deadline: Deadline) -> Any:
        time.sleep(0.3)
        raise PeerLost(1, "nobody listens there any more")

    agent._connections.port.dial = dial  # type: ignore[method-assign]

    def one(_number: int) -> float:
        began = time.monotonic()
        assert isinstance(error_of(agent.call, 1, "echo", 1, timeout=20), PeerLost)
        return time.monotonic() - began

    return at_once(8, one)


def test_threads_do_not_find_out_one_after_another_that_a_rank_is_lost() -> None:
    times = run("simulated", 2, serve, threads_of_a_lost_rank)
    assert max(times) < 1.5, times  # eight times 0.3 s would be 2.4


# -- forks and interrupts --------------------------------------------------------------------------------------------


def forked(agent: Agent) -> None:
    use_everything(agent)
    stream = agent.call(1, "count", 100)
    assert next(stream) == 0
    thing = agent.create(1, "Thing")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            error = error_of(agent.call, 1, "echo", 1, timeout=2)
            thing_error = error_of(thing.sleep, 0.001)
            del stream, thing
            gc.collect()
            agent.close()
            code = 0 if isinstance(error, PhalanxError) and isinstance(thing_error, PhalanxError) else 2
            import atexit

            atexit._run_exitfuncs()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    thing.sleep(0.001)
    assert sum(stream) == 4950
    use_everything(agent)


def test_a_fork_leaves_the_parents_agent_alone(processes: str) -> None:
    run(processes, 2, serve, forked)


def wait_in_a_child(agent: Agent) -> tuple[list[str], Any]:
    """What a forked child hears of a call that its parent has begun, and what the parent gets."""
    future = agent.call_async(1, "wait", 0.5)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            found = [type(error_of(future.result)).__name__, type(error_of(future.exception)).__name__]
            os.write(writing, " ".join(found).encode())
        finally:
            os._exit(0)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], 10.0)
    heard = os.read(reading, 1000).decode().split() if ready else ["nothing"]
    if not ready:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reading)
    return heard, future.result()


def test_a_forked_child_does_not_wait_for_the_answers_of_its_parent(processes: str) -> None:
    heard, result = run(processes, 2, serve_wait, wait_in_a_child)
    assert heard == ["Closed", "Closed"]
    assert result == 0.5


def serve_wait(agent: Agent) -> None:
    agent.register("wait", lambda seconds: (time.sleep(seconds), seconds)[1])


def interrupted(agent: Agent, seed: int) -> list[str]:
    """Ctrl-C again and again, wherever the main thread is; another thread calls all the time."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rng = random.Random(seed)
    stop = threading.Event()
    beside = Watch()

    def go_on() -> None:
        while not stop.is_set():
            assert agent.call(1, "echo", 3, timeout=10) == 3

    beside.start(go_on)
    interrupts = 0
    for number in range(150):
        timer = threading.Timer(rng.uniform(0.0005, 0.005), os.kill, (os.getpid(), signal.SIGINT))
        try:
            try:
                timer.start()
                if number % 3 == 0:
                    agent.call(1, "sleep", 0.02)
                while True:
                    agent.call(1, "echo", number)
                    if number % 3 == 2:
                        agent.call_async(1, "echo", np.zeros(3000)).result()
            except KeyboardInterrupt:
                interrupts += 1
        finally:
            timer.join()
    stop.set()
    beside.join()
    errors = [repr(error) for _, error in beside.ended if error is not None]
    for number in range(50):
        assert agent.call(1, "echo", number, timeout=5) == number
    use_everything(agent)
    assert interrupts == 150
    return errors


def interrupted_before_it_connects(agent: Agent) -> int:
    """Ctrl-C at every line from the beginning of a first call to where it connects."""
    place = reached = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal reached
        if frame.f_code is Connections._connect.__code__:
            sys.settrace(None)
        if frame.f_code is not Connections.link_to.__code__:
            return None
        if event == "line":
            reached += 1
            if reached == place:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    while reached >= place:
        place, reached = place + 1, 0
        sys.settrace(trace)
        try:
            agent.call(1, "echo", 1)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        until(lambda: answers(agent), "a connection")
        agent._connections.callers[1].end(ChannelClosed(1, "the next call connects"))
    return place


def answers(agent: Agent) -> bool:
    """Whether a call goes through; one that meets the end of the last connection does not."""
    try:
        return bool(agent.call(1, "echo", 2, timeout=2) == 2)
    except PhalanxError:
        return False


def test_ctrl_c_before_a_connection_leaves_the_agent_usable() -> None:
    assert run("simulated", 2, serve, interrupted_before_it_connects) > 5


def test_ctrl_c_in_a_call_leaves_the_agent_usable(processes: str) -> None:
    errors = run(processes, 2, serve, interrupted, 7)
    # A message that was torn in the middle ends its link, which others may see: but never as a call without an answer.
    assert not any(Timeout.__name__ in error for error in errors), errors


# -- the next link to the same rank ----------------------------------------------------------------------------------


LINKED = pytest.mark.parametrize("world", ["rings", "tcp", "simulated", "star", "classic mesh"])


def serve_links(agent: Agent) -> None:
    links = agent._connections.servers

    def say_after(word: str, seconds: float) -> str:
        time.sleep(seconds)
        return word

    def end_links() -> None:
        for link in list(links):
            link.end(ProtocolError("the test says so"))

    agent.register(say_after)
    agent.register(end_links)
    agent.register("links", lambda: len(links))


def ended_by_the_caller(agent: Agent) -> str:
    """A link ends while its only call is served; the first call of the next one has the same number."""
    old = agent.call_async(1, "say_after", "old", 0.3, timeout=20)
    agent._connections.callers[1].end(ChannelClosed(1, "the next call connects"))
    assert isinstance(error_of(old.result, 5), ChannelClosed)
    new = agent.call_async(1, "say_after", "new", 0.6, timeout=20)
    word = new.result(20)
    until(lambda: agent.call(1, "links") == 1, "the end of the first link on the other rank")
    return str(word)


@LINKED
def test_a_new_link_has_nothing_to_do_with_the_last_one(world: str) -> None:
    assert run(world, 2, serve_links, ended_by_the_caller) == "new"


def ended_by_the_server(agent: Agent) -> tuple[BaseException, float]:
    began = time.monotonic()
    error = error_of(agent.call, 1, "end_links", timeout=20)
    seconds = time.monotonic() - began
    assert agent.call(1, "links", timeout=20) == 1
    return error, seconds


@LINKED
def test_a_caller_hears_that_the_server_has_ended_its_link(world: str) -> None:
    error, seconds = run(world, 2, serve_links, ended_by_the_server)
    assert type(error) is ChannelClosed
    assert seconds < bound(5.0)


# -- calls in hand: taken off their link's list, and not finished yet ------------------------------------------------


LONG = 20.0
"""Seconds that a call has which is lost: its thread is not to wait that long."""


def link_to_1(agent: Agent) -> CallerLink:
    assert agent.call(1, "echo", 0) == 0
    return agent._connections.callers[1]


def late_while_in_hand(agent: Agent) -> BaseException:
    """The deadline passes after another thread has taken the call off the list, and before that finishes it."""
    return error_of(link_to_1(agent).finish, PendingCall("echo", Deadline(0.0), None))


def test_a_deadline_that_passes_while_the_answer_is_in_hand(where: str) -> None:
    assert type(run(where, 2, serve, late_while_in_hand)) is px.RpcTimeout


def interrupted_with_a_call_in_hand(agent: Agent, plain: bool) -> None:
    """A signal handler raises in the mover, just after that has taken the call of another thread off the list."""
    link = link_to_1(agent)
    future = agent.call_async(1, "sleep", 0.5, timeout=LONG)
    [(number, pending)] = link.calls.items()
    heard: list[BaseException | None] = []
    future.add_done_callback(lambda done: heard.append(done.exception()))
    until(lambda: link.mover_lock.acquire(blocking=False), "the part of the mover")

    class Interrupted(dict[int, PendingCall]):
        def pop(self, *args: Any) -> Any:
            super().pop(*args)
            raise KeyboardInterrupt

    def read(*_: Any) -> list[Frame]:
        link._unhandled = True
        if plain:
            link.take_plain([(CallKind.RESULT, number, b"", 0, 0)])
        return [Frame(CallKind.ERROR, number, b"", 0)]

    link.calls = Interrupted(link.calls)
    link.read_frames = read  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            link.move()
    finally:
        link.hand_over()
    assert pending.done
    assert isinstance(pending.error, ChannelClosed)
    until(lambda: heard, "the callback")
    assert isinstance(heard[0], PhalanxError)


@pytest.mark.parametrize("plain", [True, False])
def test_an_interrupt_with_a_call_in_hand(where: str, plain: bool) -> None:
    run(where, 2, serve, interrupted_with_a_call_in_hand, plain)


def lost_by_an_interrupt(agent: Agent, listed: bool) -> float:
    """The link has ended, but what should have finished the call was interrupted: its own thread does it."""
    link = link_to_1(agent)
    link.end(ChannelClosed(1, "ended by a test"))
    pending = PendingCall("echo", Deadline(LONG), None)
    pending.number = 1000
    if listed:
        link.calls[1000] = pending
    began = time.process_time(), time.monotonic()
    assert isinstance(error_of(link.finish, pending), ChannelClosed)
    assert time.process_time() - began[0] < 0.5
    return time.monotonic() - began[1]


@pytest.mark.parametrize("listed", [True, False])
def test_the_end_of_a_link_ends_every_wait(where: str, listed: bool) -> None:
    assert run(where, 2, serve, lost_by_an_interrupt, listed) < bound(1)


def mover_that_wakes_nobody(agent: Agent) -> float:
    """A signal handler raises in the mover when that has given its part up, and before it wakes the next one."""
    link = link_to_1(agent)
    until(lambda: link.mover_lock.acquire(blocking=False), "the part of the mover")
    took: list[float] = []

    def call() -> None:
        began = time.monotonic()
        agent.call(1, "echo", 1, timeout=LONG)
        took.append(time.monotonic() - began)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    until(lambda: link._waiting, "a thread that waits")
    time.sleep(0.05)
    link.mover_lock.release()
    thread.join(LONG + 5)
    return took[0] if took else LONG


def test_a_mover_that_wakes_nobody(where: str) -> None:
    assert run(where, 2, serve, mover_that_wakes_nobody) < bound(3)


# -- an error that nobody expected -----------------------------------------------------------------------------------


def serve_waits(agent: Agent) -> None:
    released = threading.Event()
    agent.register("wait", lambda: released.wait(60))
    agent.register("release", released.set)


def out_of_memory_once(agent: Agent) -> BaseException:
    """The agent's thread fails between two calls, as without memory, while a call is under way that it watches."""
    poller = agent._poller
    rebuild = poller._rebuild

    def fail() -> NoReturn:
        poller._rebuild = rebuild  # type: ignore[method-assign]
        raise MemoryError("none left")

    under_way = agent.call_async(1, "wait", timeout=60)
    under_way.add_done_callback(lambda _: None)  # so that the agent's thread reads the answer
    poller._rebuild = fail  # type: ignore[method-assign]
    poller.reload_streams()
    poller._waker.set()
    error = error_of(under_way.result, 20)
    agent.call(1, "release", timeout=20)
    return error


@pytest.mark.parametrize("world", ["rings", "tcp", "simulated", "pure"])
def test_an_unexpected_error_of_the_agents_thread_ends_calls_and_not_the_agent(world: str) -> None:
    error = run(world, 2, serve_waits, out_of_memory_once)
    assert type(error) is ChannelClosed
    assert "an unexpected error of the agent's thread: MemoryError: none left" in str(error)
