"""A caller that is faster than its server is slowed down: nothing piles up on either side, and nothing is lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.lateness import bound
from tests.rpc.support import at_once, error_of, memory, run, until

import phalanx as px
from phalanx.errors import Timeout
from phalanx.rpc import Agent
from phalanx.testing import run_ranks

SECONDS = 0.6
"""Of each flood but one; `make calls ARGS="--flood 60"` does it for longer."""
GROWTH = 40
"""MiB by which a process may grow: buffers of sockets and rings, what may wait in queues, and the allocator's own."""


def serve(agent: Agent) -> None:
    seen = {"calls": 0, "running": 0, "most": 0, "waiting": 0}
    lock = threading.Lock()

    def take(_data: Any) -> int:
        with lock:
            seen["calls"] += 1
            mine = seen["calls"]
            seen["running"] += 1
            seen["most"] = max(seen["most"], seen["running"])
            seen["waiting"] = max(seen["waiting"], agent._poller.waiting)
        time.sleep(0.002)
        with lock:
            seen["running"] -= 1
        return mine

    agent.register(take)
    agent.register("seen", lambda: seen)
    agent.register("memory", memory)
    agent.register("pid", os.getpid)
    agent.register("echo", lambda x: x)
    agent.register("give", lambda size: np.ones(size, np.uint8))


def flood(agent: Agent, how: str, size: int, seconds: float) -> dict[str, int]:
    """Sends for a while as quickly as it can."""
    data = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    agent.call(1, "take", data)
    mine, theirs = memory(), agent.call(1, "memory")
    most_mine = most_theirs = sent = 0
    futures = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(10):
            if how == "notify":
                agent.notify(1, "take", data)
            else:
                futures.append(agent.call_async(1, "take", data))
            sent += 1
        futures = [future for future in futures if not future.done() or future.exception()]
        most_mine = max(most_mine, memory())
        if sent % 200 == 0:
            most_theirs = max(most_theirs, agent.call(1, "memory"))
    for future in futures:
        future.result(20)
    until(lambda: agent.call(1, "seen")["calls"] == sent + 1, "all that was sent", 20)
    most_theirs = max(most_theirs, agent.call(1, "memory"))
    return {"sent": sent, "mine": most_mine - mine, "theirs": most_theirs - theirs, **agent.call(1, "seen")}


@pytest.mark.parametrize(
    ("where", "how", "size", "seconds"),
    [
        ("rings", "notify", 100, SECONDS),
        ("rings", "notify", 50_000, 4.0),
        ("rings", "call_async", 50_000, SECONDS),
        ("tcp", "notify", 50_000, SECONDS),
        ("tcp", "call_async", 100, SECONDS),
    ],
)
def test_a_caller_faster_than_the_handler(where: str, how: str, size: int, seconds: float) -> None:
    found = run(where, 2, serve, flood, how, size, seconds, workers=2, max_queue=64, max_in_flight=128)
    assert found["calls"] == found["sent"] + 1
    assert found["most"] <= 2
    assert found["waiting"] <= 64 + 128, found  # a batch that came in one piece may exceed the bound
    assert found["mine"] < GROWTH, found
    assert found["theirs"] < GROWTH, found
    in_buffers = (600 << 10) // (size + 50)
    assert found["sent"] < (seconds + 1) / 0.002 * 2 + in_buffers + 500, (
        "the caller was not slowed to the handlers' pace"
    )


def never_more_at_once(agent: Agent, seconds: float) -> dict[str, int]:
    futures = [agent.call_async(1, "work", seconds) for _ in range(500)]
    for future in futures:
        future.result(20)
    return dict(agent.call(1, "seen"))


def serve_work(agent: Agent) -> None:
    seen = {"running": 0, "most": 0}
    lock = threading.Lock()

    def work(seconds: float) -> None:
        with lock:
            seen["running"] += 1
            seen["most"] = max(seen["most"], seen["running"])
        time.sleep(seconds)
        with lock:
            seen["running"] -= 1

    agent.register(work)
    agent.register("seen", lambda: seen)


@pytest.mark.parametrize("workers", [1, 2])
def test_no_more_handlers_at_once_than_workers(workers: int) -> None:
    """Handlers as long as the agent's thread runs them itself before another takes its part from it."""
    for seconds in (0.0009, 0.0011):
        assert run("rings", 2, serve_work, never_more_at_once, seconds, workers=workers)["most"] <= workers


def in_flight(agent: Agent, release: Path) -> int:
    most = 0
    futures = []
    for _ in range(60):
        futures.append(agent.call_async(1, "take", 0))
        most = max(most, len(agent._connections.callers[1].calls))
    assert all(future.result(10) for future in futures)
    assert agent.call(1, "seen")["calls"] == 60
    held = [agent.call_async(1, "hold", str(release)) for _ in range(5)]
    began = time.monotonic()
    assert isinstance(error_of(agent.call, 1, "take", 0, timeout=0.2), Timeout)  # there is no place for it
    assert time.monotonic() - began < bound(0.5)
    late = agent.call_async(1, "take", 0, timeout=0.1)
    assert isinstance(late.exception(), Timeout)
    release.touch()
    for future in held:
        future.result(10)
    agent.call(1, "take", 0)
    return most


def serve_hold(agent: Agent) -> None:
    serve(agent)
    # By a file: a call has no place while all are held.
    agent.register("hold", lambda path: until(Path(path).exists, "the release"))


def test_no_more_in_flight_than_was_said(where: str, tmp_path: Path) -> None:
    assert run(where, 2, serve_hold, in_flight, tmp_path / "release", max_in_flight=5) == 5


def by_turns(agent: Agent) -> list[int]:
    """Calls of each of three threads that call in a loop, while only one call may be in flight."""
    end = time.monotonic() + 1.0

    def one(_: int) -> int:
        count = 0
        while time.monotonic() < end:
            agent.call(1, "echo", count)
            count += 1
        return count

    return at_once(3, one)


@pytest.mark.parametrize("where", ["rings", "tcp", "pure"])
def test_those_that_wait_for_a_slot_go_first(where: str) -> None:
    counts = run(where, 2, serve, by_turns, max_in_flight=1)
    assert min(counts) > max(counts) / 4, counts


def others_while_full(agent: Agent) -> list[float]:
    """Rank 0 floods rank 1 with more than it may keep; rank 2 has its calls answered all the same."""
    times = []
    if agent.rank == 0:
        end = time.monotonic() + 0.8
        while time.monotonic() < end:
            agent.notify(1, "take", b"x" * 4000)
    elif agent.rank == 2:
        time.sleep(0.2)
        for _ in range(10):
            began = time.monotonic()
            agent.call(1, "echo", 1)
            times.append(time.monotonic() - began)
    return times


def test_a_full_queue_drains(processes: str) -> None:
    times = run(processes, 3, serve, others_while_full, everyone=True, workers=2, max_queue=50)[2]
    assert max(times) < bound(1.0)


def _timed_out(agent: Agent, how: str, data: bytes) -> str | None:
    """What the error says if a call is not sent or answered in time."""
    try:
        made = getattr(agent, how)(1, "take", data, timeout=0.02)
        if how == "call_async":
            made.result()
    except Timeout as error:
        return str(error)
    return None


def stopped(agent: Agent) -> dict[str, Any]:
    """The server is stopped for a while: it takes nothing, and says nothing."""
    pid = agent.call(1, "pid")
    data = np.random.default_rng(1).integers(0, 256, 1 << 20, np.uint8)
    before = memory()
    outcomes: dict[str, int] = {"notify": 0, "call": 0, "call_async": 0}
    os.kill(pid, signal.SIGSTOP)
    try:
        for _ in range(20):
            for how in outcomes:
                words = _timed_out(agent, how, data.tobytes())
                assert words is None or ("rank 1" in words and "take" in words), words
                outcomes[how] += words is not None
        grown = memory() - before
        queued = agent._connections.callers[1].queued_bytes
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: not agent._connections.callers[1].queued_bytes, "what is left")
    assert agent.call(1, "echo", 5) == 5
    return {**outcomes, "grown": grown, "queued": queued}


def test_a_stopped_server(processes: str) -> None:
    found = run(processes, 2, serve, stopped)
    assert found["notify"] >= 19  # the very first may fit into the buffers of a connection
    assert found["call"] == 20
    assert found["call_async"] == 20
    assert found["grown"] < GROWTH, found
    assert found["queued"] < 20 << 20, found


def stopped_caller(world: px.Group) -> Any:
    """A caller asks for much and is stopped: its server must not keep all the answers in memory."""
    with px.rpc.Agent(world, timeout=20) as agent:
        serve(agent)
        go = threading.Event()
        agent.register("go", go.set)
        world.barrier()
        result: Any = None
        if world.rank == 0:
            futures = [agent.call_async(1, "give", 1 << 20) for _ in range(400)]
            agent.notify(2, "go")
            result = [len(future.result()) for future in futures] == [1 << 20] * 400
        elif world.rank == 2:
            pid, before = agent.call(0, "pid"), agent.call(1, "memory")
            assert go.wait(10)
            os.kill(pid, signal.SIGSTOP)
            try:
                time.sleep(0.5)
                result = agent.call(1, "memory") - before
            finally:
                os.kill(pid, signal.SIGCONT)
        world.barrier()
    return result


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_stopped_caller(transport: str) -> None:
    answered, _, grown = run_ranks(
        3, stopped_caller, backend="mesh", options=px.Options(transport=transport), timeout=40
    )
    assert answered
    assert grown < 100, f"the server keeps {grown} MiB of answers that nobody takes"


def notify_while_the_agent_writes(agent: Agent) -> float:
    """Seconds of a notification whose bytes all go by the agent's thread, just before the caller would sleep."""
    agent.call(1, "take", 0)
    link = agent._connections.callers[1]
    move = link.move

    def late(spin: float = 0.0, wait: float = 0.0, waker: int = -1) -> bool:
        while wait > 0 and link.queued_bytes:
            link.try_write_queued()
        return move(spin, wait, waker)

    link.move = late  # type: ignore[method-assign]
    began = time.monotonic()
    agent.notify(1, "take", np.ones(32 << 20, np.uint8), timeout=15)
    return time.monotonic() - began


def test_a_caller_is_woken_by_room_that_another_thread_made(stream: str) -> None:
    assert run(stream, 2, serve, notify_while_the_agent_writes) < 10


def serve_sizes(agent: Agent) -> None:
    sizes: list[int] = []
    agent.register("note", lambda text, path: (sizes.append(len(text)), Path(path).write_text(repr(sizes))))
    agent.register("pid", os.getpid)


def notify_and_rest(agent: Agent, path: str) -> str:
    """Notifies a rank that reads nothing for a moment, and makes no other call after that."""
    pid = agent.call(1, "pid")
    os.kill(pid, signal.SIGSTOP)
    try:
        agent.notify(1, "note", "x" * (7 << 20), path)
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: Path(path).exists() and bool(Path(path).read_text()), "what was notified")
    return Path(path).read_text()


@pytest.mark.parametrize("where", ["rings", "tcp", "pure"])
def test_a_notification_that_waits_in_the_queue_goes_although_no_call_follows(where: str, tmp_path: Path) -> None:
    assert run(where, 2, serve_sizes, notify_and_rest, str(tmp_path / "sizes")) == repr([7 << 20])


def close_after_giving_up(group: px.Group) -> float:
    """Seconds to close an agent that has given up calls to itself, whose long results nobody reads."""
    agent = Agent(group, timeout=20)
    serve(agent)
    for _ in range(4):
        future = agent.call_async(0, "give", 32 << 20)
        time.sleep(0.002)
        future.cancel()
    time.sleep(0.3)
    began = time.monotonic()
    agent.close()
    return time.monotonic() - began


def test_closing_does_not_wait_for_results_that_nobody_wants() -> None:
    assert run_ranks(1, close_after_giving_up, backend="mesh", options=px.Options(transport="tcp"))[0] < bound(5.0)
