"""Remote calls on the classic wire: time limits, lost ranks, and the end of an agent."""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import threading
import time

import pytest
from tests.classic.plain_rank import u64
from tests.classic.together import seats, side_by_side
from tests.lateness import bound
from tests.rpc.classic.worlds import (
    WORLDS,
    agent_threads,
    agents,
    beside_plain,
    echo_after,
    every_world,
    on_both,
    patience,
    register_all,
    request_of,
    respond,
    result_of,
)

import phalanx as px
from phalanx.errors import Cancelled, NoConnection, PeerLost, RemoteError
from phalanx.rpc.classic.agent import ClassicAgent


@every_world
def test_a_call_that_takes_too_long(kind: str) -> None:
    with agents(kind) as made:
        gate = threading.Event()
        made[1].register("wait", echo_after(gate))
        begin = time.monotonic()
        future = made[0].call_async(1, "wait", timeout=0.1)
        with pytest.raises(px.Timeout, match=r"call of 'wait' on rank 1: no answer within 0.05 s") as late:
            made[0].call(1, "wait", b"late", timeout=0.05)
        assert late.value.peer == (2 if "sub" in kind else 1)
        with pytest.raises(px.Timeout, match="0.1 s"):
            future.result(patience)
        assert 0.1 <= time.monotonic() - begin < bound(2)
        gate.set()
        for _ in range(3):  # the late answers come between these, and are dropped
            assert made[0].call(1, "echo", b"next") == b"next"


def test_late_answers_are_no_junk(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "phalanx.rpc"), beside_plain("star", 0) as (agent, plain):
        with pytest.raises(px.Timeout):
            agent.call(1, "f", timeout=0.01)
        cancelled = agent.call_async(1, "f")
        assert cancelled.cancel()
        assert cancelled.cancel()
        assert concurrent.futures.wait([cancelled], timeout=1).done
        with pytest.raises(concurrent.futures.CancelledError):
            cancelled.result()
        for number in (1, 2):
            assert plain.recv(0)[1] == number
            respond(plain, result_of(number, b"late"))
        future = agent.call_async(1, "f")
        respond(plain, result_of(3, b"in time"))
        assert future.result(patience) == b"in time"
        assert not future.cancel()
    assert not caplog.records


def test_the_default_time_limit() -> None:
    with agents("simulated", timeout=0.05) as made:
        made[1].register("wait", lambda payload: time.sleep(0.3) or b"")
        with pytest.raises(px.Timeout, match="0.05 s"):
            made[0].call(1, "wait")
        with pytest.raises(px.Timeout, match="0.05 s"):
            made[0].call_async(1, "wait").result(patience)
        assert made[0].call(1, "wait", timeout=patience) == b""


def test_requests_that_never_left_are_taken_back() -> None:
    """A rank that does not read: calls time out one after another, and what was not sent does not pile up."""
    with beside_plain("star", 0) as (agent, plain):
        payload = bytes(8 << 20)
        for _ in range(4):
            with pytest.raises(px.Timeout):
                agent.call(1, "f", payload, timeout=0.05)
        assert len(agent._calls.messages.lane.unsent()) == 1, "the first is on its way and must go on"
        assert plain.recv(0) == request_of(1, b"f", payload)
        plain.send(request_of(1, b"echo"), 0)
        assert plain.recv(0) == u64(14)


@on_both
def test_a_lost_rank(topology: str, own: int) -> None:
    with beside_plain(topology, own) as (agent, plain):
        peer = 1 - own
        futures = [agent.call_async(peer, "f") for _ in range(3)]
        plain.recv(own)
        begin = time.monotonic()
        plain.close()
        for future in futures:
            with pytest.raises(PeerLost) as lost:
                future.result(patience)
            assert lost.value.peer == peer
        with pytest.raises(PeerLost):
            agent.call(peer, "f")
        with pytest.raises(PeerLost):
            agent.call_async(peer, "f").result(0)
        assert time.monotonic() - begin < bound(2)
        assert agent.call(own, "echo", b"alone") == b"alone"


def test_a_lost_rank_fails_its_own_calls_only() -> None:
    with seats("mesh", ["phalanx", "plain", "plain"]) as world, ClassicAgent(world[0].phalanx) as agent:
        lost, kept = agent.call_async(1, "f"), agent.call_async(2, "f")
        world[1].plain.recv(0)
        world[1].plain.send(u64(1000), 0)
        world[1].plain.connections[0].sendall(u64(1000) + b"\x02 in the middle of an answer")
        world[1].plain.close()
        with pytest.raises(PeerLost):
            lost.result(patience)
        assert not kept.done()
        world[2].plain.send(u64(14), 0)
        world[2].plain.send(result_of(2, b""), 0)
        assert kept.result(patience) == b""


@pytest.mark.parametrize("kind", ["simulated", "mesh", "phalanx-mesh", "sub"])
def test_a_rank_that_closes_its_backend(kind: str) -> None:
    with WORLDS[kind](2) as backends, ClassicAgent(backends[0]) as agent:
        other = ClassicAgent(backends[1])
        future = agent.call_async(1, "unknown")
        with pytest.raises(RemoteError):
            future.result(patience)
        backends[1].close()
        with pytest.raises(PeerLost):
            agent.call(1, "echo", timeout=patience)
        other._calls.messages.thread.join(patience)
        assert not other._calls.messages.thread.is_alive, "without its backend the agent has nothing to do"
        with pytest.raises(px.errors.Closed):
            other.call(0, "echo")
        other.close()


@pytest.mark.parametrize("kind", ["simulated", "mesh", "phalanx-mesh", "sub"])
def test_the_own_backend_is_closed_under_a_call(kind: str) -> None:
    with WORLDS[kind](2) as backends, ClassicAgent(backends[0]) as other:
        gate = threading.Event()
        other.register("wait", echo_after(gate))
        agent = ClassicAgent(backends[1])
        agent.register("wait", echo_after(gate))
        futures = [agent.call_async(dst, "wait") for dst in (0, 1)]
        backends[1].close()
        for future in futures:
            with pytest.raises(PeerLost):
                future.result(patience)
        gate.set()
        agent.close()


def test_the_own_backend_is_closed_just_before_the_agents_thread_goes_to_sleep() -> None:
    """What woke it was forgotten, and a call to this rank itself waited for ever."""
    with WORLDS["mesh"](2) as backends:
        gate = threading.Event()
        agent = ClassicAgent(backends[1])
        agent.register("wait", echo_after(gate))
        future = agent.call_async(1, "wait")
        messages = agent._calls.messages
        waker = messages.waker

        class Late:
            fd = waker.fd
            set = waker.set

            def clear(self) -> None:
                backends[1].close()
                waker.clear()

        messages.waker = Late()  # type: ignore[assignment]
        waker.set()
        try:
            with pytest.raises(PeerLost):
                future.result(patience)
        finally:
            gate.set()
            agent.close()


def test_workers_of_the_star_have_no_connection() -> None:
    with agents("star", 3) as made:
        with pytest.raises(NoConnection, match="rank 1 has no connection to rank 2"):
            made[1].call(2, "echo")
        with pytest.raises(NoConnection):
            made[1].call_async(2, "echo").result(0)
        assert made[1].call(0, "echo", b"x") == b"x"


@every_world
def test_close_cancels_answers_and_leaves_nothing(kind: str) -> None:
    with WORLDS[kind](2) as backends:
        server, client = ClassicAgent(backends[0], workers=1), ClassicAgent(backends[1])
        begun, gate = threading.Event(), threading.Event()

        @server.register
        def wait(payload: bytes) -> bytes:
            begun.set()
            assert gate.wait(patience)
            return payload

        running, waiting = client.call_async(0, "wait", b"done"), client.call_async(0, "wait")
        assert begun.wait(patience)
        closing = threading.Thread(target=server.close)
        closing.start()
        with pytest.raises(RemoteError, match="rank 0 serves no more calls"):
            waiting.result(patience)
        gate.set()
        assert running.result(patience) == b"done", "a handler that runs may finish"
        closing.join(patience)
        unanswered = client.call_async(0, "wait")
        client.close()
        client.close()
        with pytest.raises(Cancelled):
            unanswered.result(0)
        assert agent_threads() == []
        for agent in (server, client):
            with pytest.raises(px.errors.Closed):
                agent.call(0, "wait")


def test_close_ends_handlers_that_wait_for_calls() -> None:
    with WORLDS["mesh"](2) as backends, ClassicAgent(backends[1]) as other:
        agent = ClassicAgent(backends[0])
        begun, gate = threading.Event(), threading.Event()
        other.register("wait", echo_after(gate))

        @agent.register
        def nested(payload: bytes) -> bytes:
            begun.set()
            return agent.call(1, "wait")

        future = other.call_async(0, "nested")
        assert begun.wait(patience)
        begin = time.monotonic()
        agent.close()
        assert time.monotonic() - begin < bound(2)
        with pytest.raises(RemoteError, match="this agent was closed"):
            future.result(patience)
        gate.set()


def test_the_backend_is_free_again_after_close() -> None:
    with WORLDS["mesh"](2) as backends:
        for _ in range(2):
            with ClassicAgent(backends[0]) as agent, ClassicAgent(backends[1]):
                with pytest.raises(px.errors.UsageError, match="has an agent on this backend already"):
                    ClassicAgent(backends[0])
                with pytest.raises(RemoteError):
                    agent.call(1, "f")
            side_by_side(*(functools.partial(backend.barrier, timeout=patience) for backend in backends))
        backends[0].send(b"plain", 1)
        buffer = bytearray(5)
        backends[1].recv(buffer, 0)
        assert buffer == b"plain"


def test_groups_on_the_same_backend_go_on() -> None:
    """A group has streams of its own, and may be what the agent is made with."""
    with WORLDS["star"](2) as backends:
        groups = [px.Group(backend) for backend in backends]
        with ClassicAgent(groups[0]) as first, ClassicAgent(groups[1]) as second:
            register_all(first)
            register_all(second)

            def play(rank: int) -> None:
                agent = (first, second)[rank]
                for _ in range(20):
                    groups[rank].barrier(timeout=patience)
                    assert agent.call(1 - rank, "who") == b"%d" % (1 - rank)

            side_by_side(*(functools.partial(play, rank) for rank in (0, 1)))
        for group in groups:
            group.close()
