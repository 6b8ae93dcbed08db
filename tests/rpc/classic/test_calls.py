"""Remote calls on the classic wire: both roles at once, and how they are used."""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import mmap
import os
import queue
import threading
import time
from typing import Any

import pytest
from tests.classic.plain_rank import u64
from tests.classic.together import side_by_side
from tests.rpc.classic.worlds import (
    agent_threads,
    agents,
    echo_after,
    every_world,
    patience,
)

import phalanx as px
from phalanx.errors import InvalidMessage, RemoteError
from phalanx.rpc.classic.agent import ClassicAgent


@every_world
def test_both_roles_at_once(kind: str) -> None:
    """Every connected pair, both ways at the same time, with payloads that could be taken for lengths."""
    payloads = [b"", b"x", u64(0), u64(15), b"\x02" * 8, b"\x01" * 17, os.urandom(1 << 20), memoryview(b"view")]
    with agents(kind, 3) as made:
        pairs = [pair for pair in itertools.permutations(range(3), 2) if kind != "star" or 0 in pair]

        def play(src: int, dst: int) -> None:
            assert made[src].call(dst, "who") == str(dst).encode()
            for payload in payloads:
                assert made[src].call(dst, "echo", payload) == bytes(payload)
            with pytest.raises(RemoteError) as failed:
                made[src].call(dst, "fail", b"this")
            assert str(failed.value) == f"rank {dst} does not like b'this'"

        side_by_side(*(functools.partial(play, *pair) for pair in pairs))
        for rank in range(3):
            assert made[rank].call(rank, "who") == str(rank).encode()


@every_world
def test_many_calls_in_flight(kind: str) -> None:
    with agents(kind) as made:
        sent = [[str(200 * rank + n).encode() * 50 for n in range(200)] for rank in (0, 1)]
        futures = [[made[rank].call_async(1 - rank, "echo", data) for data in sent[rank]] for rank in (0, 1)]
        for rank in (0, 1):
            assert [future.result(patience) for future in futures[rank]] == sent[rank]


@every_world
def test_nested_calls_do_not_wait_for_each_other(kind: str) -> None:
    """More calls than workers go back and forth several times: no place may be held while waiting."""
    with agents(kind, workers=1, timeout=5.0) as made:
        for agent in made:

            def bounce(payload: bytes, agent: ClassicAgent = agent) -> bytes:
                left = int(payload)
                if left == 0:
                    return b"end"
                answer = agent.call(1 - agent.rank, "bounce", str(left - 1).encode())
                return answer + str(agent.rank).encode()

            agent.register("bounce", bounce)
        futures = [made[n % 2].call_async(1 - n % 2, "bounce", b"5") for n in range(8)]
        for n, future in enumerate(futures):
            first = str(1 - n % 2)
            second = str(n % 2)
            assert future.result(patience) == f"end{first}{second}{first}{second}{first}".encode()


@every_world
def test_unknown_name_and_the_rank_of_an_error(kind: str) -> None:
    with agents(kind) as made:
        with pytest.raises(RemoteError) as failed:
            made[0].call(1, "it's")
        assert str(failed.value) == "function 'it's' not registered on rank 1"
        assert failed.value.peer == (2 if "sub" in kind else 1)
        assert "it's" in (failed.value.operation or "")


def test_answers_come_in_any_order() -> None:
    with agents("mesh") as made:
        gate = threading.Event()
        made[1].register("slow", echo_after(gate))
        first = made[0].call_async(1, "slow", b"slow")
        assert made[0].call(1, "echo", b"quick") == b"quick"
        assert not first.done()
        gate.set()
        assert first.result(patience) == b"slow"


class Together:
    """A handler that notes how many of it run at the same time."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._lock = threading.Lock()

    def __call__(self, payload: bytes) -> bytes:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(0.01)
        with self._lock:
            self.now -= 1
        return b""


def test_handlers_run_at_the_same_time_but_not_more_than_allowed() -> None:
    with agents("simulated", workers=3) as made:
        count = Together()
        made[1].register("count", count)
        for future in [made[0].call_async(1, "count") for _ in range(20)]:
            future.result(patience)
        assert count.most == 3
        assert agent_threads().count("phalanx-calls") == 3


def test_a_place_that_was_given_away_is_not_there_twice() -> None:
    """Handlers that come back from a nested call find their place taken, and may only finish."""
    with agents("simulated", workers=1) as made:
        count = Together()
        made[1].register("count", count)
        made[1].register("nested", lambda payload: made[1].call(0, "echo", payload))
        for _ in range(3):
            futures = [made[0].call_async(1, name) for name in ["nested"] * 4 + ["count"] * 8]
            for future in futures:
                future.result(patience)
        assert count.most == 1


def test_more_requests_than_may_wait_are_refused() -> None:
    with agents("mesh", workers=1, max_queue=2) as made:
        gate = threading.Event()
        made[1].register("wait", echo_after(gate))
        futures = [made[0].call_async(1, "wait", b"%d" % n) for n in range(5)]
        for future in futures[3:]:
            with pytest.raises(RemoteError, match=r"rank 1 has too many calls waiting \(max_queue is 2\)"):
                future.result(patience)
        with pytest.raises(RemoteError, match="not registered"):  # needs no worker
            made[0].call(1, "unknown", timeout=patience)
        gate.set()
        assert [future.result(patience) for future in futures[:3]] == [b"0", b"1", b"2"]
        assert made[0].call(1, "wait", b"again") == b"again"


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (7, "function 'odd' returned int (expected bytes)"),
        ("text", "function 'odd' returned str (expected bytes)"),
        (KeyError(), "KeyError"),
        (ValueError("\ud800"), r"\ud800"),
        (SystemExit("no"), "no"),
    ],
    ids=str,
)
def test_what_a_handler_may_do_wrong(result: Any, words: str) -> None:
    with agents("simulated", workers=1) as made:

        def odd(payload: bytes) -> Any:
            if isinstance(result, BaseException):
                raise result
            return result

        made[1].register("odd", odd)
        for _ in range(2):
            with pytest.raises(RemoteError) as failed:
                made[0].call(1, "odd")
            assert str(failed.value) == words


def test_any_buffer_is_a_result() -> None:
    with agents("simulated") as made:
        made[1].register("array", lambda payload: bytearray(payload) * 2)
        assert made[0].call(1, "array", bytearray(b"ab")) == b"abab"


def test_a_result_over_one_gib_is_an_error() -> None:
    with agents("simulated") as made:
        huge: Any = memoryview(mmap.mmap(-1, (1 << 30) + 1))
        with pytest.raises(InvalidMessage, match="too large"):
            made[0].call(1, "echo", huge)
        assert made[0].call(1, "echo", b"next") == b"next"


def test_callbacks_cannot_wait_for_other_calls() -> None:
    with agents("mesh") as made:
        seen: queue.Queue[BaseException | None] = queue.Queue()

        def callback(done: concurrent.futures.Future[bytes]) -> None:
            for wait in (lambda: made[0].call(1, "echo"), lambda: made[0].call_async(1, "echo").result()):
                try:
                    wait()
                except px.errors.UsageError as error:
                    seen.put(error)

        gate = threading.Event()
        made[1].register("wait", echo_after(gate))
        future = made[0].call_async(1, "wait")
        future.add_done_callback(callback)
        gate.set()
        for _ in range(2):
            assert "holds up the answers" in str(seen.get(timeout=patience))
        assert made[0].call(1, "echo", b"x") == b"x"


def test_bad_arguments_are_refused_at_once() -> None:
    with agents("simulated") as made:
        agent = made[0]
        for dst in (-1, 2, "1"):
            with pytest.raises(px.errors.InvalidRank):
                agent.call_async(dst, "echo")  # type: ignore[arg-type]
        with pytest.raises(px.errors.UnsupportedArray):
            agent.call_async(1, "echo", "text")
        with pytest.raises(InvalidMessage, match="name of a request cannot be written"):
            agent.call_async(1, "\ud800")
        with pytest.raises(px.errors.UsageError, match="timeout"):
            agent.call(1, "echo", timeout=-1)
        with pytest.raises(px.errors.UsageError, match="cannot be registered"):
            agent.register("x", 3)  # type: ignore[call-overload]
        assert agent.call(1, "echo", b"x") == b"x"
    for options in ({"workers": 0}, {"max_queue": -1}, {"timeout": -1.0}):
        (backend,) = px.backends.SimulatedBackend.create_group(1)
        with pytest.raises(px.errors.UsageError):
            ClassicAgent(backend, **options)  # type: ignore[arg-type]
        backend.close()
        with pytest.raises(px.errors.Closed):
            ClassicAgent(backend)


def test_functions_that_are_there_from_the_start() -> None:
    """A request that came before the agent was made is not answered with `not registered`."""
    backends = px.backends.SimulatedBackend.create_group(2, timeout=patience)
    with ClassicAgent(backends[0]) as early:
        future = early.call_async(1, "double", b"ab")
        with ClassicAgent(backends[1], functions={"double": lambda payload: payload * 2}):
            assert future.result(patience) == b"abab"
    for backend in backends:
        backend.close()
