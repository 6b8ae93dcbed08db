"""Short answers, which the waiting thread takes from the pipe itself, and everything that may come in between."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest
from tests.lateness import bound
from tests.rpc.support import at_once, error_of, frame, run, until

import phalanx as px
from phalanx._native import core
from phalanx.deadline import Deadline
from phalanx.errors import ChannelClosed, PeerLost, PhalanxError, RpcTimeout, UsageError
from phalanx.rpc import Agent
from phalanx.rpc.caller import CallerLink
from phalanx.rpc.lanes import LANES_FROM
from phalanx.rpc.pipe import READ_AHEAD, Pipe, open_pipe
from phalanx.testing import run_ranks
from phalanx.transports.duplex_ring import DuplexRing
from phalanx.transports.stream import Stream
from phalanx.transports.waker import Waker
from phalanx.wire.calls import CallKind

MOMENT = 1e-4
"""Seconds to look for an answer."""


def serve(agent: Agent) -> None:
    agent.register("echo", lambda x: x)
    agent.register("sleep", time.sleep)
    agent.register("pid", os.getpid)

    def nothing(seconds: float) -> Iterator[int]:
        time.sleep(seconds)
        yield from ()

    def fail() -> None:
        raise ValueError("oops")

    agent.register(nothing)
    agent.register(fail)


def link_of(agent: Agent) -> CallerLink:
    agent.call(1, "echo", 0)
    return agent._connections.callers[1]


# -- what a pipe gives -----------------------------------------------------------------------------------------------


@pytest.fixture
def pipe() -> Iterator[tuple[Pipe, socket.socket]]:
    if core is None:
        pytest.skip("only the core takes short answers")
    ours, theirs = socket.socketpair()
    yield open_pipe(Stream(ours)), theirs
    ours.close()
    theirs.close()


def test_the_answer_of_a_call(pipe: tuple[Pipe, socket.socket]) -> None:
    ours, theirs = pipe
    assert ours.answer(7, MOMENT) is None
    theirs.sendall(frame(CallKind.RESULT, 7, b"seven") + frame(CallKind.RESULT, 8, b""))
    assert ours.answer(7, MOMENT) == b"seven"
    assert not ours.may_sleep()  # there is another
    assert ours.answer(8, MOMENT) == b""
    assert ours.may_sleep()


@pytest.mark.parametrize(
    ("first", "payload"),
    [
        ((CallKind.RESULT, 6, b"x"), b""),
        ((CallKind.ERROR, 7, b"x"), b""),
        ((CallKind.STREAM, 7, b"x"), b""),
        ((CallKind.RESULT, 7, b"x"), b"an array"),
    ],
)
def test_other_frames_are_left_for_others(pipe: tuple[Pipe, socket.socket], first: Any, payload: bytes) -> None:
    ours, theirs = pipe
    theirs.sendall(frame(*first, payload) + frame(CallKind.RESULT, 7, b"seven"))
    assert ours.answer(7, MOMENT) is None
    assert ours.answer(7, MOMENT) is None
    assert ours.pull(0.0, 1) == [(*first, len(payload), len(first[2]))]
    if payload:
        assert ours.fill(memoryview(bytearray(len(payload)))) == len(payload)
    assert ours.answer(7, MOMENT) == b"seven"


def test_bytes_that_are_no_frame_are_left(pipe: tuple[Pipe, socket.socket]) -> None:
    ours, theirs = pipe
    theirs.sendall(frame(CallKind.RESULT, 6, b"six") + bytes(100))
    assert ours.pull(0.0, 64) == [(CallKind.RESULT, 6, b"six", 0, 3)]
    assert not ours.may_sleep()
    assert ours.answer(7, MOMENT) is None
    ours.check()
    assert ours.pull(0.0, 64) == []
    with pytest.raises(px.errors.ProtocolError, match="expected the header of a frame, got 00000000"):
        ours.check()


def test_an_answer_that_comes_byte_by_byte(pipe: tuple[Pipe, socket.socket]) -> None:
    ours, theirs = pipe
    whole = frame(CallKind.RESULT, 7, b"seven")
    for at in range(len(whole) - 1):
        theirs.sendall(whole[at : at + 1])
        assert ours.answer(7, MOMENT) is None
    theirs.sendall(whole[-1:])
    assert ours.answer(7, MOMENT) == b"seven"


def test_a_sleep_until_the_answer_or_anything_else_comes(pipe: tuple[Pipe, socket.socket]) -> None:
    ours, theirs = pipe
    waker = Waker()
    began = time.monotonic()
    timer = threading.Timer(0.05, theirs.sendall, (frame(CallKind.RESULT, 7, b"seven"),))
    timer.start()
    assert ours.answer(7, 0.0, 60.0, waker.fd) == b"seven"
    timer.join()
    waker.set()
    assert ours.answer(8, 0.0, 60.0, waker.fd) is None
    waker.clear()
    theirs.sendall(frame(CallKind.ERROR, 8, b"eight"))
    assert ours.answer(8, 0.0, 60.0, waker.fd) is None
    assert ours.pull(0.0, 1) == [(CallKind.ERROR, 8, b"eight", 0, 5)]
    theirs.close()
    assert ours.answer(9, 0.0, 60.0, waker.fd) is None
    assert time.monotonic() - began < bound(10)


@pytest.mark.parametrize("call", [7, 8])
def test_a_head_that_fills_the_buffer(pipe: tuple[Pipe, socket.socket], call: int) -> None:
    """However often threads look for their answers: it is neither theirs nor the end of the connection."""
    ours, theirs = pipe
    head = bytes(READ_AHEAD + 1)
    theirs.sendall(frame(CallKind.RESULT, 7, head))
    for _ in range(3):
        assert ours.answer(call, MOMENT) is None
    ours.check()
    assert ours.pull(0.0, 1) == [(CallKind.RESULT, 7, None, 0, len(head))]


def test_the_end_of_the_connection(pipe: tuple[Pipe, socket.socket]) -> None:
    ours, theirs = pipe
    theirs.sendall(frame(CallKind.RESULT, 7, b"seven"))
    theirs.close()
    assert ours.answer(7, MOMENT) == b"seven"
    assert ours.answer(8, MOMENT) is None
    with pytest.raises(Exception, match="closed"):
        ours.check()


# -- another thread was faster ---------------------------------------------------------------------------------------


def after_start(link: CallerLink, act: Callable[[Any], None]) -> None:
    """Does something between the sending of the next request and the look for its answer, which are two steps then."""
    start = link.start
    exchange, link.pipe.exchange = link.pipe.exchange, lambda *_: False  # type: ignore[method-assign]

    def once(pending: Any, outgoing: Any, **options: Any) -> None:
        del link.start
        link.pipe.exchange = exchange  # type: ignore[method-assign]
        start(pending, outgoing, **options)
        act(pending)

    link.start = once  # type: ignore[method-assign]


def has_bytes(link: CallerLink) -> bool:
    if isinstance(link.stream, DuplexRing):
        return link.stream.inbound.pending
    return bool(select.select([link.stream.fd], [], [], 0)[0])


def handled_by_another(agent: Agent) -> None:
    link = link_of(agent)
    numbers: list[int] = []

    def read_it(pending: Any) -> None:
        numbers.append(pending.number)
        assert link.wait(pending, Deadline(10.0))

    after_start(link, read_it)
    assert agent.call(1, "echo", "mine") == "mine"
    after_start(link, read_it)
    assert isinstance(error_of(agent.call, 1, "fail"), px.RemoteError)

    def read_its_beginning(pending: Any) -> None:
        read_it(pending)
        until(lambda: has_bytes(link), "the end of the stream")

    after_start(link, read_its_beginning)
    items = agent.call(1, "nothing", 0.1)
    assert list(items) == []  # and not the result with which the stream ends
    assert len(numbers) == 3
    assert not link.calls


def test_an_answer_that_another_thread_has_read(processes: str) -> None:
    run(processes, 2, serve, handled_by_another)


def ended_before(agent: Agent) -> None:
    link = link_of(agent)
    number = link.stream.fd
    ours, theirs = socket.socketpair()

    def end(_pending: Any) -> None:
        link.end(ChannelClosed(1, "ended by a test"))
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)
        os.dup2(theirs.fileno(), number)  # as if another part of the program opened something
        ours.sendall(b"not for the link")

    after_start(link, end)
    error = error_of(agent.call, 1, "echo", 1, timeout=10)
    assert isinstance(error, PeerLost), repr(error)
    assert os.read(number, 100) == b"not for the link"
    os.close(number)
    ours.close()
    theirs.close()
    assert agent.call(1, "echo", 2) == 2  # over a new one


def test_a_link_that_ended_before_is_not_read(processes: str) -> None:
    run(processes, 2, serve, ended_before)


# -- many threads ----------------------------------------------------------------------------------------------------


def long_and_short(agent: Agent) -> list[Any]:
    """Threads whose answers differ in length and kind read for each other."""
    long = "x" * (READ_AHEAD + 1000)

    def one(number: int) -> int:
        for turn in range(150):
            if number % 4 == 0:
                assert agent.call(1, "echo", long, timeout=20) == long
            elif number % 4 == 1:
                assert agent.call_async(1, "echo", turn, timeout=20).result() == turn
            elif number % 4 == 2 and turn % 10 == 0:
                assert list(agent.call(1, "nothing", 0.0, timeout=20)) == []
            else:
                assert agent.call(1, "echo", [number, turn], timeout=20) == [number, turn]
        return number

    results = at_once(6, one)
    link = agent._connections.callers[1]
    until(lambda: not link.calls and not link._unattended, "the end of all calls")
    assert not link.mover_lock.locked()
    return results


def test_threads_read_for_each_other(processes: str) -> None:
    assert run(processes, 2, serve, long_and_short) == list(range(6))


def short_deadlines(agent: Agent) -> None:
    """A call that times out is cancelled, and its late answer is no other call's."""
    for number in range(30):
        error = error_of(agent.call, 1, "sleep", 0.003, timeout=(number % 3) * 1e-3)
        assert isinstance(error, RpcTimeout), repr(error)
        assert agent.call(1, "echo", number) == number
    assert not agent._connections.callers[1].calls


def test_calls_that_time_out_between_others(processes: str) -> None:
    run(processes, 2, serve, short_deadlines)


def cancelled_meanwhile(agent: Agent) -> tuple[int, int]:
    """Futures that are cancelled by one thread while another settles them."""
    answered = cancelled = 0
    sys.setswitchinterval(1e-6)
    for number in range(1000):
        future = agent.call_async(1, "echo", number)
        called: list[Any] = []
        if number % 2:
            future.add_done_callback(called.append)
        thread = threading.Thread(target=future.cancel)
        thread.start()
        try:
            assert future.result(10) == number
            answered += 1
            assert future.done()
            assert not future.cancelled()
            assert future.exception() is None
        except concurrent.futures.CancelledError:
            cancelled += 1
            assert future.cancelled()
        thread.join()
        if number % 2:
            until(lambda called=called: called, "the callback")
            assert called == [future]
    link = agent._connections.callers[1]
    until(lambda: link._unattended == 0 and not link.calls, "the end of all calls")
    assert agent.call_async(1, "echo", "next").result(10) == "next"
    return answered, cancelled


def test_futures_cancelled_while_they_settle(processes: str) -> None:
    answered, cancelled = run(processes, 2, serve, cancelled_meanwhile)
    assert answered + cancelled == 1000


def beside_a_future_and_a_coroutine(agent: Agent) -> list[int]:
    """A thread that takes its own answers leaves those of futures, callbacks and coroutines to be read."""
    called: list[int] = []
    stop = threading.Event()

    def call_on() -> None:
        while not stop.is_set():
            assert agent.call(1, "echo", 1, timeout=20) == 1

    thread = threading.Thread(target=call_on)
    thread.start()

    async def several() -> list[int]:
        return list(await asyncio.gather(*(agent.acall(1, "echo", n, timeout=20) for n in range(50))))

    try:
        for number in range(50):
            agent.call_async(1, "echo", number, timeout=20).add_done_callback(lambda f: called.append(f.result()))
        found = asyncio.run(several())
        until(lambda: len(called) == 50, "all callbacks")
    finally:
        stop.set()
        thread.join()
    assert sorted(called) == list(range(50))
    return found


def test_answers_of_futures_beside_a_thread_that_calls(processes: str) -> None:
    assert run(processes, 2, serve, beside_a_future_and_a_coroutine) == list(range(50))


# -- the end comes meanwhile -----------------------------------------------------------------------------------------


def closed_meanwhile(world: px.Group) -> list[Any]:
    agent = Agent(world, timeout=20)
    serve(agent)
    world.barrier()
    results: list[Any] = []
    if world.rank == 0:
        calling = threading.Semaphore(0)

        def one(number: int) -> int:
            if number == 0:
                for _ in range(3):
                    assert calling.acquire(timeout=10)
                agent.close(drain=False)
                return 0
            for turn in range(1_000_000):
                if turn == 20:
                    calling.release()
                assert agent.call(1, "echo", turn) == turn
            return number

        results = at_once(4, one)
        assert not any(thread.name.startswith("phalanx-rpc") for thread in threading.enumerate())
    world.barrier()
    agent.close(drain=False)
    return results


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_an_agent_that_is_closed_while_threads_call(transport: str) -> None:
    results = run_ranks(2, closed_meanwhile, backend="mesh", options=px.Options(transport=transport), timeout=40)[0]
    assert results[0] == 0
    assert all(isinstance(error, PhalanxError) and not isinstance(error, RpcTimeout) for error in results[1:]), results


def killed_meanwhile(world: px.Group) -> Any:
    agent = Agent(world, timeout=20)
    serve(agent)
    world.barrier()
    if world.rank == 1:
        time.sleep(30)
    pid = agent.call(1, "pid")
    calling = threading.Semaphore(0)
    killed_at = 0.0

    def one(number: int) -> float:
        nonlocal killed_at
        if number == 0:
            for _ in range(3):
                assert calling.acquire(timeout=10)
            killed_at = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            return 0.0
        try:
            for turn in range(1_000_000):
                if turn == 20:
                    calling.release()
                assert agent.call(1, "echo", turn) == turn
        except PeerLost:
            return time.monotonic()
        return -1.0

    results = at_once(4, one)
    agent.close(drain=False)
    return [at if isinstance(at, Exception) else at - killed_at for at in results[1:]]


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_rank_killed_while_threads_call(transport: str) -> None:
    options = px.Options(transport=transport)
    results = run_ranks(2, killed_meanwhile, backend="mesh", options=options, may_die=[1], timeout=40)[0]
    assert all(isinstance(late, float) and 0 <= late < bound(1.0) for late in results), results


# -- Ctrl-C ----------------------------------------------------------------------------------------------------------


def interrupted_at_every_call(agent: Agent) -> list[int]:
    """Ctrl-C at every place of a call where Python looks for signals: a function begins, or one of C has ended."""
    places = []
    for name, argument in (("echo", 1), ("sleep", 0.002)):
        place = reached = 0

        def profile(frame: FrameType, event: str, _: Any) -> None:
            nonlocal reached
            if event in ("call", "c_return") and "/phalanx/rpc/" in frame.f_code.co_filename:
                reached += 1
                if reached == place:  # noqa: B023 - called in this turn of the loop only
                    sys.setprofile(None)
                    raise KeyboardInterrupt

        while reached >= place:
            place, reached = place + 1, 0
            before = link_of(agent)
            sys.setprofile(profile)
            try:
                agent.call(1, name, argument)
            except KeyboardInterrupt:
                pass
            finally:
                sys.setprofile(None)
            assert not before.mover_lock.locked(), place
            assert not before.calls, place
            # A message that was cut short ends its link; then the next call connects anew.
            if before.ended is None:
                assert agent.call(1, "echo", 2, timeout=5) == 2, place
        places.append(place)
    return places


def test_ctrl_c_at_every_place_of_a_call(processes: str) -> None:
    assert min(run(processes, 2, serve, interrupted_at_every_call)) > 15


def calls_of_a_signal_handler(agent: Agent) -> int:
    """A signal handler makes calls, wherever its thread is in calls of its own."""
    link_of(agent)
    made: list[concurrent.futures.Future[int]] = []
    inside = False

    def handler(_number: int, _frame: FrameType | None) -> None:
        nonlocal inside
        if not inside:
            inside = True
            made.append(agent.call_async(1, "echo", len(made)))
            inside = False

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 1e-3, 0.3e-3)
    try:
        for number in range(1000):
            assert agent.call(1, "echo", number, timeout=20) == number
            assert agent.call_async(1, "echo", number, timeout=20).result() == number
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert [future.result(10) for future in made] == list(range(len(made)))
    return len(made)


def test_a_signal_handler_that_calls(processes: str) -> None:
    assert run(processes, 2, serve, calls_of_a_signal_handler) > 0


def calls_in_the_middle_of_a_frame(agent: Agent) -> list[int]:
    """The same where the thread has sent a part of a long array, and is about to queue the rest."""
    array = np.arange(LANES_FROM // 16)  # all of it over one connection
    link, made, waited = link_of(agent), [], []
    with socket.socket(fileno=os.dup(link.stream.fd)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
    send = link.pipe.send

    def handle_signal() -> None:
        made.append(agent.call_async(1, "echo", len(made)))
        agent.notify(1, "echo", 0)
        error = None
        try:
            agent.call(1, "echo", 0, timeout=20)
        except UsageError as refused:
            error = refused
        waited.append(error)

    def send_and_handle(*frame: Any) -> int:
        count = send(*frame)
        if frame[4] and link.pipe.midway:
            handle_signal()
        return count

    link.pipe.send = send_and_handle  # type: ignore[method-assign]
    for number in range(20):
        futures = [agent.call_async(1, "echo", array + i) for i in range(3)]
        for i, future in enumerate(futures):
            assert np.array_equal(future.result(20), array + i), number
    assert [future.result(20) for future in made] == list(range(len(made)))
    assert all("a signal handler cannot wait" in str(error) for error in waited)
    assert link.ended is None
    return [len(made)]


@pytest.mark.skipif(core is None, reason="the pipe in Python does not say where it is in the middle of a frame")
def test_a_signal_handler_that_calls_in_the_middle_of_a_frame() -> None:
    [made] = run("tcp", 2, serve, calls_in_the_middle_of_a_frame)
    assert made > 0
