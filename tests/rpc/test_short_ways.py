"""The short ways of a pipe: a frame that is posted, a request that comes alone, and both ends of a call at once."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.lateness import bound
from tests.rpc.support import at_once, error_of, frame, run, until

import phalanx as px
from phalanx._native import core
from phalanx.errors import PeerLost
from phalanx.rpc import Agent
from phalanx.rpc.caller import CallerLink
from phalanx.rpc.pipe import NOT_POSTED, POSTED, Pipe, open_pipe
from phalanx.transports.stream import Stream
from phalanx.transports.waker import Waker
from phalanx.wire.calls import HEADER_SIZE, CallKind

MOMENT = 1e-4
"""Seconds to look for a frame."""


@dataclass
class Ends:
    """A pipe whose short ways are open, what they look at, and the other end of the connection."""

    pipe: Pipe
    theirs: socket.socket
    moving: Any = field(default_factory=threading.Lock)
    sending: Any = field(default_factory=threading.RLock)
    unsent: deque[int] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.pipe.guard(self.moving, self.sending, self.unsent)

    def heard(self) -> bytes:
        """All that has come to the other end."""
        self.theirs.setblocking(False)
        heard = b""
        try:
            while piece := self.theirs.recv(1 << 16):
                heard += piece
        except BlockingIOError:
            pass
        return heard


@pytest.fixture
def ends() -> Iterator[Ends]:
    if core is None:
        pytest.skip("only the core has them")
    ours, theirs = socket.socketpair()
    yield Ends(open_pipe(Stream(ours)), theirs)
    ours.close()
    theirs.close()


def in_thread(act: Any) -> threading.Thread:
    thread = threading.Thread(target=act)
    thread.start()
    return thread


# -- post ------------------------------------------------------------------------------------------------------------


def test_a_frame_is_posted(ends: Ends) -> None:
    assert ends.pipe.post(CallKind.RESULT, 7, b"seven") == POSTED
    assert ends.pipe.post(CallKind.RESULT, 8, b"") == POSTED
    assert ends.heard() == frame(CallKind.RESULT, 7, b"seven") + frame(CallKind.RESULT, 8, b"")
    assert ends.pipe.written == 0


def test_nothing_is_posted_past_what_waits(ends: Ends) -> None:
    ends.unsent.append(1)
    assert ends.pipe.post(CallKind.RESULT, 7, b"seven") == NOT_POSTED
    ends.unsent.clear()
    with ends.sending:
        results: list[int] = []
        in_thread(lambda: results.append(ends.pipe.post(CallKind.RESULT, 7, b"seven"))).join()
        assert results == [NOT_POSTED]
    ends.pipe.shut()
    assert ends.pipe.post(CallKind.RESULT, 7, b"seven") == NOT_POSTED
    assert ends.heard() == b""


def test_nothing_is_kept_back_where_something_waits(ends: Ends) -> None:
    ends.unsent.append(1)
    assert not ends.pipe.hold(CallKind.RESULT, 7, b"seven", 4)
    ends.unsent.clear()
    with ends.sending:
        results: list[bool] = []
        in_thread(lambda: results.append(ends.pipe.hold(CallKind.RESULT, 7, b"seven", 4))).join()
        assert results == [False]
    assert [ends.pipe.hold(CallKind.RESULT, call, b"x", 2) for call in (1, 2, 3)] == [True, True, False]
    ends.pipe.shut()
    assert not ends.pipe.hold(CallKind.RESULT, 7, b"seven", 4)
    assert ends.pipe.held == 2


def test_what_was_kept_back_goes_before_what_is_posted(ends: Ends) -> None:
    assert ends.pipe.hold(CallKind.RESULT, 5, b"five", 4)
    assert ends.pipe.hold(CallKind.RESULT, 6, b"", 4)
    assert ends.pipe.post(CallKind.RESULT, 7, b"seven") == POSTED
    assert ends.pipe.held == 0
    assert ends.heard() == b"".join(frame(CallKind.RESULT, *given) for given in ((5, b"five"), (6, b""), (7, b"seven")))
    assert ends.pipe.written == 0


def test_the_rest_of_a_posted_frame_is_kept_back(ends: Ends) -> None:
    whole = frame(CallKind.RESULT, 7, bytes(range(250)) * 4)
    posted = 0
    while (last := ends.pipe.post(CallKind.RESULT, 7, whole[HEADER_SIZE:])) == POSTED:
        posted += 1
    if last == NOT_POSTED:  # the connection took whole ones only: as many of its bytes are free as one has
        assert not ends.pipe.held
        assert ends.heard() == whole * posted
        return
    assert ends.pipe.held == 1
    heard = ends.heard()
    assert ends.pipe.send_held()
    assert not ends.pipe.held
    assert heard + ends.heard() == whole * (posted + 1)


# -- request ---------------------------------------------------------------------------------------------------------


def test_a_request_that_comes_alone(ends: Ends) -> None:
    assert ends.pipe.request(MOMENT) is None
    ends.theirs.sendall(frame(CallKind.REQUEST, 7, b"seven"))
    assert ends.pipe.request(MOMENT) == (7, b"seven")
    assert not ends.moving.locked()
    assert ends.pipe.taken == 0


@pytest.mark.parametrize(
    "first",
    [
        frame(CallKind.REQUEST, 7, b"seven") + frame(CallKind.REQUEST, 8, b"eight"),
        frame(CallKind.REQUEST, 0, b"x"),
        frame(CallKind.NOTIFY, 7, b"x"),
        frame(CallKind.CANCEL, 7, b""),
        frame(CallKind.REQUEST, 7, b"x", b"an array"),
        bytes(100),
    ],
)
def test_anything_else_is_left_for_others(ends: Ends, first: bytes) -> None:
    ends.theirs.sendall(first)
    assert ends.pipe.request(MOMENT) is None
    assert ends.pipe.ahead == first


def test_no_request_in_the_middle_of_a_frame(ends: Ends) -> None:
    request = frame(CallKind.REQUEST, 8, b"eight")
    ends.theirs.sendall(frame(CallKind.REQUEST, 7, b"x", request))
    assert ends.pipe.pull(0.0, 1)
    assert ends.pipe.request(MOMENT) is None  # the payload looks like one
    assert ends.pipe.exchange(9, b"nine", MOMENT, 0.0) is False
    assert ends.pipe.fill(memoryview(bytearray(len(request)))) == len(request)
    ends.theirs.sendall(request)
    assert ends.pipe.request(MOMENT) == (8, b"eight")


def test_no_request_while_another_reads(ends: Ends) -> None:
    ends.theirs.sendall(frame(CallKind.REQUEST, 7, b"seven"))
    with ends.moving:
        assert ends.pipe.request(MOMENT) is None
        assert ends.pipe.exchange(8, b"eight", MOMENT, 0.0) is False
    waker = Waker()
    assert ends.pipe.request(0.0, 10.0, waker.fd) == (7, b"seven")


# -- exchange --------------------------------------------------------------------------------------------------------


def test_a_request_and_its_answer(ends: Ends) -> None:
    ends.theirs.sendall(frame(CallKind.RESULT, 7, b"answer"))
    assert ends.pipe.exchange(7, b"seven", MOMENT, 0.0) == b"answer"
    assert ends.heard() == frame(CallKind.REQUEST, 7, b"seven")
    assert ends.pipe.exchange(8, b"eight", MOMENT, 0.0) is None
    assert ends.heard() == frame(CallKind.REQUEST, 8, b"eight")
    assert not ends.moving.locked()


def test_an_exchange_sleeps_until_its_answer_comes(ends: Ends) -> None:
    began = time.monotonic()
    thread = in_thread(lambda: (time.sleep(0.05), ends.theirs.sendall(frame(CallKind.RESULT, 7, b"late"))))
    assert ends.pipe.exchange(7, b"seven", 0.0, began + 60) == b"late"
    thread.join()
    assert ends.pipe.exchange(8, b"eight", 0.0, time.monotonic() + 0.05) is None
    assert 0.1 <= time.monotonic() - began < bound(10)


def test_an_exchange_is_woken(ends: Ends) -> None:
    ends.pipe.wake()  # nobody hears it, and so it is not kept
    for number in range(3):
        began = time.monotonic()
        if number:
            thread = in_thread(lambda: (time.sleep(0.05), ends.pipe.wake(), ends.pipe.wake()))
        assert ends.pipe.exchange(number + 1, b"x", 0.0, began + (60 if number else 0.05)) is None
        assert 0.04 < time.monotonic() - began < bound(10)
        if number:
            thread.join()


def test_the_end_of_the_connection_ends_an_exchange(ends: Ends) -> None:
    thread = in_thread(lambda: (time.sleep(0.05), ends.theirs.close()))
    assert ends.pipe.exchange(7, b"seven", 0.0, time.monotonic() + 60) is None
    thread.join()
    with pytest.raises(Exception, match="closed|reset"):
        ends.pipe.check()


# -- links -----------------------------------------------------------------------------------------------------------


def serve(agent: Agent) -> None:
    running = most = 0
    lock = threading.Lock()

    def work(seconds: float) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(seconds)
        with lock:
            running -= 1
        return most

    agent.register("echo", lambda x: x)
    agent.register(work)


def link_of(agent: Agent) -> CallerLink:
    agent.call(1, "echo", 0)
    return agent._connections.callers[1]


def one_at_a_time(agent: Agent) -> int:
    """Calls that come alone, each while those before it still run: only one may."""

    def one(number: int) -> int:
        time.sleep(number * 0.01)
        return int(agent.call(1, "work", 0.03))

    return max(at_once(6, one))


def test_calls_that_come_alone_keep_to_the_limit(processes: str) -> None:
    assert run(processes, 2, serve, one_at_a_time, workers=1) == 1


def held_alone(agent: Agent) -> None:
    """All calls have been answered since it was found that one more may wait for others."""
    link = link_of(agent)
    assert not link.calls
    assert not link.pipe.hold(CallKind.REQUEST, 1000, b"x", link._most_held())


def test_a_request_waits_for_no_others_if_there_are_none(processes: str) -> None:
    run(processes, 2, serve, held_alone)


def number_used_twice(agent: Agent) -> Any:
    link = link_of(agent)
    first = agent.call_async(1, "work", 0.5)
    until(lambda: bool(link.calls), "the first call")
    time.sleep(0.1)
    number = next(iter(link.calls))
    link.send(CallKind.REQUEST, number, b"x")
    return error_of(first.result, 10)


def test_a_number_that_is_used_twice(processes: str) -> None:
    assert isinstance(run(processes, 2, serve, number_used_twice), PeerLost)


def abandoned_while_asleep(agent: Agent) -> float:
    """Another thread ends the link, while this one sleeps for the answer."""
    link = link_of(agent)
    began = time.monotonic()

    def end() -> None:
        time.sleep(0.1)
        link.end(px.errors.ChannelClosed(1, "ended by a test"))

    thread = in_thread(end)
    assert isinstance(error_of(agent.call, 1, "work", 3, timeout=20), px.errors.PhalanxError)
    thread.join()
    assert agent.call(1, "echo", 2) == 2  # over a new one
    return time.monotonic() - began


def test_the_end_of_a_link_wakes_whoever_sleeps(processes: str) -> None:
    assert run(processes, 2, serve, abandoned_while_asleep) < bound(2)


def queued_while_asleep(agent: Agent) -> None:
    """What another thread could not send at once is sent by the one that sleeps for its own answer."""
    link_of(agent)
    long = bytes(24 << 20)

    def one(number: int) -> int:
        if number == 0:
            return int(agent.call(1, "work", 0.3, timeout=20))
        time.sleep(0.1)
        return len(agent.call_async(1, "echo", long, timeout=20).result())

    assert at_once(2, one)[1] == len(long)


def test_a_thread_that_sleeps_sends_for_others(processes: str) -> None:
    run(processes, 2, serve, queued_while_asleep)
