"""Why a call has failed: callers are told the reason, whatever was half-way on the wire when it came to be."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
from tests.rpc.support import at_once, error_of, run, until, world_of

import phalanx as px
from phalanx import _native
from phalanx.errors import ChannelClosed, PeerLost
from phalanx.rpc import Agent, connect
from phalanx.rpc.caller import CallerLink
from phalanx.rpc.pending_call import ItemReader, PendingCall
from phalanx.rpc.pipe import NOT_POSTED
from phalanx.rpc.poller import LinkPoller
from phalanx.rpc.server import ServerLink
from phalanx.testing import run_ranks
from phalanx.transports.lending import NOTHING
from phalanx.wire.calls import CallKind

LONG = 24 << 20
"""Bytes of an argument or a result that is half-way for a while."""
CALLERS = 4


# -- an agent that closes in the middle of a frame -------------------------------------------------------------------


def stop_in_mid_argument(agent: Agent, half_way: threading.Event) -> None:
    """Has the agent read a part of the next long argument, and no more of it."""
    [link] = agent._connections.servers
    fill = link._fill

    def fill_once(*args: Any) -> bool:
        complete = fill(*args)
        if not complete:
            half_way.set()
            until(lambda: link.ended is not None, "the end of the link")
        return complete

    link._fill = fill_once  # type: ignore[method-assign]


def ends_in_mid_frame(world: px.Group, name: str, how: str) -> Any:
    """The errors of calls to rank 1 while it closes its agent, or is killed, in the middle of a frame."""
    with mock.patch.object(connect, "lending_with", return_value=NOTHING):  # what is lent is read at once
        agent = Agent(world, timeout=20)
    agent.register("take", lambda array: len(array))
    agent.register("give", lambda size: np.zeros(size, np.uint8))
    world.barrier()
    if world.rank == 0:
        assert agent.call(1, "take", b"") == 0
    world.barrier()
    if world.rank == 1:
        half_way = threading.Event()
        if name == "take":
            stop_in_mid_argument(agent, half_way)
        world.barrier()
        [link] = agent._connections.servers
        until(lambda: half_way.is_set() or any(rest.begun for rest in list(link._unsent)), "a frame that is half-way")
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        agent.close(drain=False)
        world.barrier()
        world.barrier()
        return None
    argument = LONG if name == "give" else np.zeros(LONG, np.uint8)
    link_out = agent._connections.callers[1]
    if name == "give":  # nothing is read before rank 1 has closed
        until(lambda: link_out.mover_lock.acquire(blocking=False), "the part of the mover")
    world.barrier()
    errors: list[Any] = []
    calls = threading.Thread(
        target=lambda: errors.extend(at_once(CALLERS, lambda _: agent.call(1, name, argument))), daemon=True
    )
    calls.start()
    with contextlib.suppress(PeerLost):
        world.barrier()
    if name == "give":
        link_out.hand_over()
    calls.join(15)
    after = error_of(agent.call, 1, "take", b"")
    with contextlib.suppress(PeerLost):
        world.barrier()
    agent.close(drain=False)
    return errors, after


@pytest.mark.parametrize("name", ["take", "give"])
def test_callers_are_told_that_an_agent_has_closed_in_the_middle_of_a_frame(stream: str, name: str) -> None:
    errors, after = run_ranks(2, ends_in_mid_frame, name, "closed", timeout=20, **world_of(stream))[0]
    assert len(errors) == CALLERS
    for error in [*errors, after]:
        assert type(error) is ChannelClosed, repr(error)
        assert error.peer == 1
        assert "it has closed its agent" in str(error)


@pytest.mark.parametrize("name", ["take", "give"])
def test_a_rank_that_was_killed_in_the_middle_of_a_frame_is_lost(stream: str, name: str) -> None:
    errors, after = run_ranks(2, ends_in_mid_frame, name, "killed", timeout=20, may_die=[1], **world_of(stream))[0]
    assert len(errors) == CALLERS
    for error in [*errors, after]:
        assert type(error) is PeerLost, repr(error)
        assert error.peer == 1


# -- a world that ends, and agents that close because of it -----------------------------------------------------------


def told_late(world: px.Group) -> list[str]:
    """Rank 1 aborts, and rank 0 closes its agent before the others know why."""
    agent = Agent(world, timeout=20)
    agent.register("sleep", time.sleep)
    control: Any = world._backend.control
    tell, hear = control._client.abort if world.rank == 1 else None, control.on_abort

    def tell_and_dawdle(*args: Any, **kwargs: Any) -> None:
        tell(*args, **kwargs)
        time.sleep(0.5)

    asked = threading.Event()

    def hear_late(*args: Any) -> None:
        asked.wait(5.0)
        hear(*args)

    explain = CallerLink.explain

    def ask(link: CallerLink, error: Exception) -> px.PhalanxError:
        asked.set()
        return explain(link, error)

    if world.rank == 1:
        control._client.abort = tell_and_dawdle
    elif world.rank == 2:
        control.on_abort = hear_late
        mock.patch.object(CallerLink, "explain", ask).start()  # for as long as this process lives
    world.barrier()
    futures = [agent.call_async(dst, "sleep", 2.0) for dst in range(3) if dst != world.rank]
    time.sleep(0.3)  # they have arrived
    if world.rank == 1:
        threading.Thread(target=world.abort, args=("enough",), daemon=True).start()
    errors = [str(error_of(future.result)) for future in futures]
    agent.close(drain=False)
    return errors


def test_an_agent_that_closes_because_the_world_has_ended_is_not_the_reason(processes: str) -> None:
    for rank, errors in enumerate(run_ranks(3, told_late, timeout=30, may_die=(0, 1, 2), **world_of(processes))):
        assert all("enough" in error for error in errors), (rank, errors)


# -- an agent that closes before a call has begun ----------------------------------------------------------------------


def closes_before_it_begins(world: px.Group, name: str) -> Any:
    """The error of a call whose turn comes after its agent has begun to close, and before its link has ended."""
    agent = Agent(world, timeout=20, workers=2)
    begin, busy = threading.Event(), threading.Event()
    agent.register("hold", lambda: (busy.set(), begin.wait(15)))
    agent.register("queued", lambda: 1)
    agent.register("ask_back", lambda: (busy.set(), agent.call(0, "hold")))
    world.barrier()
    if world.rank == 1:
        assert busy.wait(10)
        [link] = agent._connections.servers
        calls = 3 if name == "queued" else 1
        until(lambda: len(link.served) == calls, "the calls")
        say_goodbye = link.say_goodbye

        def let_them_run_first() -> None:
            begin.set()
            until(lambda: not agent._poller.running and not agent._poller.waiting, "the end of the handlers")
            say_goodbye()

        link.say_goodbye = let_them_run_first  # type: ignore[method-assign]
        agent.close(drain=False)
        world.barrier()
        return None
    names = ["hold", "hold", "queued"] if name == "queued" else [name]
    error = error_of([agent.call_async(1, one) for one in names][-1].result, 15)
    begin.set()
    world.barrier()
    agent.close(drain=False)
    return error


@pytest.mark.parametrize("name", ["queued", "ask_back"])
def test_a_call_that_meets_an_agent_which_is_closing(processes: str, name: str) -> None:
    error = run_ranks(2, closes_before_it_begins, name, timeout=20, **world_of(processes))[0]
    assert type(error) is ChannelClosed, repr(error)
    assert error.peer == 1


# -- no connection in time ---------------------------------------------------------------------------------------------


def not_connected(world: px.Group, has_none: bool) -> list[Any]:
    """The errors of calls of 10 ms to a rank that is stopped, or has no agent."""
    pids = world.all_gather_object(os.getpid())
    agent = Agent(world, timeout=20) if world.rank == 0 or not has_none else None
    world.barrier()
    errors: list[Any] = []
    if world.rank == 0:
        assert agent is not None
        if not has_none:
            os.kill(pids[1], signal.SIGSTOP)
        try:
            errors = at_once(2, lambda _: agent.call(1, "echo", 1, timeout=0.01))
        finally:
            os.kill(pids[1], signal.SIGCONT)
    world.barrier()
    if agent is not None:
        agent.close(drain=False)
    return errors


# Without the core there is no agreement on rings to wait for: a call to a rank without an agent is sent at once.
NO_AGENT = pytest.param(
    "rings",
    True,
    marks=pytest.mark.skipif(not _native.available, reason="only the core has rings (PHALANX_PURE is set)"),
)


@pytest.mark.parametrize(("where", "has_none"), [NO_AGENT, ("rings", False), ("tcp", False)])
def test_a_call_that_could_not_be_sent_in_time_says_what_it_waited_for(where: str, has_none: bool) -> None:
    for error in run_ranks(2, not_connected, has_none, timeout=20, **world_of(where))[0]:
        assert type(error) is px.RpcTimeout, repr(error)
        assert "no connection to the agent of rank 1 within 0.01 s, so nothing was sent: " in str(error)
        assert (error.peer, error.seconds) == (1, 0.01)


# -- a deadline that passes at a bad moment ----------------------------------------------------------------------------


def serve_numbers(agent: Agent) -> None:
    begun, closed = threading.Event(), threading.Event()

    def numbers(count: int) -> Iterator[int]:
        begun.set()
        try:
            yield from range(count)
        finally:
            closed.set()

    agent.register(numbers)
    agent.register("left open", lambda: begun.is_set() and not closed.wait(2))
    agent.register("echo", lambda x: x)


def late_before_it_is_sent(agent: Agent) -> Any:
    """A call is given up after it was entered and before its request is sent."""
    assert agent.call(1, "echo", 1) == 1
    link = agent._connections.callers[1]
    send, post = link.send, link.pipe.post

    def send_late(kind: int, *args: Any, **kwargs: Any) -> bool:
        if kind == CallKind.REQUEST:
            until(lambda: all(pending.deadline.expired for pending in list(link.calls.values())), "the deadline")
            link._expire_calls()  # as the agent's thread does
        return send(kind, *args, **kwargs)

    link.send = send_late  # type: ignore[method-assign]
    link.pipe.post = lambda *_: NOT_POSTED  # type: ignore[method-assign]
    future = agent.call_async(1, "numbers", 1000, timeout=0.01)
    del link.send
    link.pipe.post = post  # type: ignore[method-assign]
    return error_of(future.result, 5), agent.call(1, "left open")


def test_a_call_that_is_late_before_it_is_sent_is_cancelled_on_the_other_rank(where: str) -> None:
    error, left_open = run(where, 2, serve_numbers, late_before_it_is_sent)
    assert type(error) is px.RpcTimeout
    assert not left_open


def late_while_its_stream_begins(agent: Agent, how: str) -> Any:
    """The deadline passes while another thread opens the stream that the call has returned."""
    assert agent.call(1, "echo", 1) == 1
    link = agent._connections.callers[1]
    open_stream = link._open_stream

    def open_late(opened_by: CallerLink, pending: PendingCall) -> ItemReader:
        late = threading.Thread(target=link.abandon, args=(pending, link.timed_out(pending)))
        late.start()
        late.join(0.2)  # if it has to wait for this thread, it does so longer
        return open_stream(opened_by, pending)

    link._open_stream = open_late
    try:
        if how == "call":
            return list(agent.call(1, "numbers", 40, timeout=1))
        return list(agent.call_async(1, "numbers", 40, timeout=1).result())
    finally:
        link._open_stream = open_stream
        assert not agent.call(1, "left open")
        until(lambda: not link.calls and not link._unattended, "the end of all calls")


@pytest.mark.parametrize("how", ["call", "call_async"])
def test_a_deadline_that_passes_while_a_stream_begins(where: str, how: str) -> None:
    assert run(where, 2, serve_numbers, late_while_its_stream_begins, how) == list(range(40))


# -- a link that comes at a bad moment ---------------------------------------------------------------------------------


def comes_while_one_link_is_served(agent: Agent) -> Any:
    """A link comes just when the agent's thread looks whether the only one that it has is paused."""
    if agent.rank == 0:
        assert agent.call(1, "echo", 1) == 1
        agent.join()
        agent.join()
        until(
            lambda: agent.call(1, "looked", np.ones(10_000)), "the look"
        )  # it has a payload: the thread looks, mostly
        return None
    agent.join()
    [link] = agent._connections.servers
    outcome: list[Any] = []
    calls = threading.Thread(target=lambda: outcome.extend(at_once(1, lambda _: agent.call(1, "echo", 7, timeout=2))))

    class Looked(ServerLink):
        @property
        def is_paused(self) -> bool:
            if sys._getframe(1).f_code is LinkPoller._serve_alone.__code__ and calls.ident is None:
                calls.start()
                until(lambda: len(agent._poller._links) == 2, "the second link")
            return super().is_paused

    link.__class__ = Looked
    agent.register("looked", lambda _: calls.ident is not None)
    agent.join()
    until(lambda: outcome, "the outcome of the call")
    return outcome[0]


def test_a_link_that_comes_while_another_is_served_is_read(processes: str) -> None:
    assert run(processes, 2, serve_numbers, comes_while_one_link_is_served, everyone=True)[1] == 7


# -- no descriptor left ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """As if this process had as many files open as it may."""
    os.close(lowest := os.dup(0))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def start_without_descriptors(world: px.Group) -> Any:
    """What an agent raises that cannot start, and what its rank says to those that call it."""
    if world.rank == 1:
        with no_descriptors():
            error = error_of(Agent, world)
        world.barrier()
        world.barrier()
        return error
    with Agent(world) as agent:
        world.barrier()
        error = error_of(agent.call, 1, "echo", 1, timeout=5)
        world.barrier()
    return error


def test_an_agent_that_cannot_start_names_the_limit(processes: str) -> None:
    told, error = run_ranks(2, start_without_descriptors, timeout=20, **world_of(processes))
    assert type(error) is px.OutOfResources, repr(error)
    assert "RLIMIT_NOFILE" in str(error)
    assert type(told) is ChannelClosed, repr(told)


def call_without_descriptors(agent: Agent, how: str) -> BaseException:
    calls: dict[str, Callable[[], Any]] = {
        "call": lambda: agent.call(1, "echo", 1),
        "itself": lambda: agent.call(0, "echo", 1),
        "call_async": lambda: agent.call_async(1, "echo", 1).result(5),
        "notify": lambda: agent.notify(1, "echo", 1),
        "wait": lambda: agent.call(1, "nap", 0.5),
        "wait_async": lambda: future.result(5),
    }
    if how.startswith("wait"):  # connected already: a thread that has never waited needs a descriptor to do so
        future = agent.call_async(1, "echo", 1)
        until(future.done, "the connection")
        future = agent.call_async(1, "nap", 0.5)
    for _ in range(10):
        with no_descriptors():
            [error] = at_once(1, lambda _: calls[how]())
        if isinstance(error, BaseException) or how != "wait":
            break  # else the agent's own thread was reading at that moment: to wait for that takes no descriptor
    assert agent.call(1, "echo", 3, timeout=5) == 3
    assert agent.call(0, "echo", 3, timeout=5) == 3
    assert isinstance(error, BaseException), error
    return error


def serve_naps(agent: Agent) -> None:
    agent.register("echo", lambda x: x)
    agent.register("nap", time.sleep)


@pytest.mark.parametrize("how", ["call", "itself", "call_async", "notify", "wait", "wait_async"])
def test_a_call_that_has_no_descriptor_names_the_limit(processes: str, how: str) -> None:
    error = run(processes, 2, serve_naps, call_without_descriptors, how)
    assert type(error) is px.OutOfResources, repr(error)
    assert "RLIMIT_NOFILE" in str(error)
