"""Requests and answers that are kept back for a moment, to be sent together."""

from __future__ import annotations

import concurrent.futures
import socket
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from tests.rpc.support import LIMIT, WORLDS, run

from phalanx import Options
from phalanx._native import core
from phalanx.rpc import Agent
from phalanx.rpc.pipe import NOT_POSTED, POSTED, open_pipe
from phalanx.transports.stream import Stream
from phalanx.wire.calls import CallKind, pack_header

BURST = 300
"""Calls at once, which are more than are sent together."""


def serve_in_order(agent: Agent) -> None:
    seen: list[int] = []

    def note(number: int) -> int:
        seen.append(number)
        return number

    agent.register("note", note)
    agent.register("seen", lambda: seen)


def burst(agent: Agent) -> tuple[list[int], list[int]]:
    futures = [agent.call_async(1, "note", number) for number in range(BURST)]
    return [future.result() for future in futures], agent.call(1, "seen")


@pytest.mark.parametrize("where", WORLDS)
def test_a_burst_is_served_in_order(where: str) -> None:
    answers, seen = run(where, 2, serve_in_order, burst, workers=1)
    assert answers == seen == list(range(BURST))


def note_in_file(agent: Agent) -> None:
    def note(path: str) -> None:
        with Path(path).open("ab") as file:
            file.write(b"x")

    agent.register("note", note)


def leave_alone(agent: Agent, path: str, count: int) -> int:
    agent.call(1, "note", path)
    futures = [agent.call_async(1, "note", path) for _ in range(count)]
    end = time.monotonic() + LIMIT / 2
    while Path(path).stat().st_size <= count and time.monotonic() < end:
        time.sleep(1e-3)
    found = Path(path).stat().st_size - 1
    for future in futures:
        future.result()
    return found


@pytest.mark.parametrize("where", ["tcp", "rings", "pure"])
def test_requests_go_although_nobody_waits_for_their_answers(where: str, tmp_path: Path) -> None:
    """The last few of a burst may be kept back, and nothing follows them."""
    assert run(where, 2, note_in_file, leave_alone, str(tmp_path / "notes"), 41) == 41


def watched(agent: Agent) -> tuple[int, int]:
    """How often the agent's thread was asked to read the answers of bursts, and how often it moved."""
    moves = asked = 0
    poller = agent._poller
    move, watch = poller._move, poller.watch

    def count_moves(*args: Any, **kwargs: Any) -> None:
        nonlocal moves
        moves += 1
        move(*args, **kwargs)

    def count_watch(link: Any) -> None:
        nonlocal asked
        asked += 1
        watch(link)

    agent.call(1, "seen")
    poller._move, poller.watch = count_moves, count_watch  # type: ignore[method-assign]
    for _ in range(20):
        for future in [agent.call_async(1, "note", number) for number in range(8)]:
            future.result()
    return asked, moves


@pytest.mark.parametrize("where", ["tcp", "rings"])
def test_the_agents_thread_rests_while_another_reads(where: str) -> None:
    asked, moves = run(where, 2, serve_in_order, watched)
    assert asked < 10, (asked, moves)  # of twenty bursts; a machine that is busy elsewhere may need it now and then
    assert moves < 10, (asked, moves)


def serve_without_spinning(agent: Agent) -> None:
    agent._poller._spin = 0.0  # as on a machine whose cores are all in use
    agent.register("echo", lambda x: x)


def idle(agent: Agent) -> float:
    """Processor seconds in half a second without calls, after each rank has called both others."""
    for distance in (1, 2):
        agent.call((agent.rank + distance) % 3, "echo", 1)
    agent._group.barrier()
    before = time.process_time()
    time.sleep(0.5)
    used = time.process_time() - before
    agent._group.barrier()
    return used


@pytest.mark.parametrize("where", ["pure", "tls", "simulated"])
def test_an_idle_agent_sleeps(where: str, request: pytest.FixtureRequest) -> None:
    if where == "tls":
        WORLDS["tls"] = ("mesh", {"options": Options(tls=request.getfixturevalue("tls"))})
    assert max(run(where, 3, serve_without_spinning, idle, everyone=True)) < 0.1


def serve_quick_and_slow(agent: Agent) -> None:
    released = threading.Event()

    def echo(number: int) -> int:
        return number

    def mostly_quick(waits: bool) -> bool:
        return not waits or released.wait(LIMIT)

    agent.register("echo", echo)
    agent.register("mostly_quick", mostly_quick)
    agent.register("release", released.set)


def answers_before_a_slow_one(agent: Agent) -> list[Any]:
    for _ in range(20):  # so that it passes for quick
        [future.result() for future in [agent.call_async(1, "mostly_quick", False) for _ in range(20)]]
    quick = [agent.call_async(1, "echo", number) for number in range(12)]
    slow = agent.call_async(1, "mostly_quick", True)
    answers: list[Any] = [future.result() for future in quick]  # the slow one ends only after this
    agent.call(1, "release")
    return [*answers, slow.result()]


@pytest.mark.parametrize("where", ["tcp", "rings", "pure"])
def test_answers_do_not_wait_for_a_slow_function_after_them(where: str) -> None:
    assert run(where, 2, serve_quick_and_slow, answers_before_a_slow_one) == [*range(12), True]


def wait_in_every_way(agent: Agent) -> list[Any]:
    futures = [agent.call_async(1, "echo", number) for number in range(40)]
    called: concurrent.futures.Future[Any] = concurrent.futures.Future()
    futures[0].add_done_callback(lambda future: called.set_result(future.result()))
    done, open_ = concurrent.futures.wait(futures[:20], timeout=LIMIT)
    later = sorted(future.result() for future in concurrent.futures.as_completed(futures[20:], timeout=LIMIT))
    at_once: list[int] = []
    futures[1].add_done_callback(lambda future: at_once.append(future.result()))
    states = {(future.done(), future.cancelled(), future.running(), future.cancel()) for future in futures}
    return [called.result(LIMIT), len(done), len(open_), later, at_once, states, futures[2].exception()]


@pytest.mark.parametrize("where", ["tcp", "rings"])
def test_the_futures_are_those_of_the_standard_library(where: str) -> None:
    found = run(where, 2, serve_quick_and_slow, wait_in_every_way)
    assert found == [0, 20, 0, [*range(20, 40)], [1], {(True, False, False, False)}, None]


@pytest.mark.skipif(core is None, reason="the pipe in Python keeps nothing back")
def test_what_was_kept_back_goes_before_what_follows() -> None:
    """Also where the connection is full: what does not go is given out, and counted."""
    mine, other = socket.socketpair()
    mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    expected = b""
    with mine, other:
        pipe = open_pipe(Stream(mine))
        pipe.guard(threading.Lock(), threading.Lock(), deque())
        for call in range(1, 1000):
            head = bytes([call % 256]) * 200
            frame = pack_header(CallKind.REQUEST, len(head), call, 0) + head
            expected += frame
            if call % 3:
                assert pipe.hold(CallKind.REQUEST, call, head, 4)
                continue
            assert pipe.held == 2
            count = pipe.send(CallKind.REQUEST, call, head, (), 0)
            if count < len(frame):
                break
            assert pipe.held == 0
        assert count < len(frame)
        written = pipe.written
        rest = pipe.take_held() + frame[count:]
        assert pipe.held == 0
        assert pipe.written == written + len(rest) - len(frame[count:])
        assert pipe.midway
        assert pipe.post(CallKind.REQUEST, 1000, b"x") == NOT_POSTED
        assert not pipe.hold(CallKind.REQUEST, 1000, b"x", 4)
        received = b""
        other.setblocking(False)
        while len(received) + len(rest) < len(expected):
            received += other.recv(65536)
        assert received + rest == expected
        while rest:
            rest = rest[pipe.send_rest([memoryview(rest)]) :]
        assert not pipe.midway
        assert pipe.post(CallKind.REQUEST, 1000, b"x") == POSTED
