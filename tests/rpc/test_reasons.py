"""Why a call has failed: callers are told the reason, whatever was half-way on the wire when it came to be."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import Any

import numpy as np
import pytest
from tests.rpc.support import WORLDS, at_once, error_of, until

import phalanx as px
from phalanx.errors import ChannelClosed, PeerLost
from phalanx.rpc import Agent
from phalanx.testing import run_ranks

LONG = 24 << 20
"""Bytes of an argument or a result that is half-way for a while."""
CALLERS = 4


def _world(where: str) -> dict[str, Any]:
    """The arguments of `run_ranks` for a kind of world."""
    backend, arguments = WORLDS[where]
    return {"backend": backend, **arguments}


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
    errors, after = run_ranks(2, ends_in_mid_frame, name, "closed", timeout=20, **_world(stream))[0]
    assert len(errors) == CALLERS
    for error in [*errors, after]:
        assert type(error) is ChannelClosed, repr(error)
        assert error.peer == 1
        assert "it has closed its agent" in str(error)


@pytest.mark.parametrize("name", ["take", "give"])
def test_a_rank_that_was_killed_in_the_middle_of_a_frame_is_lost(stream: str, name: str) -> None:
    errors, after = run_ranks(2, ends_in_mid_frame, name, "killed", timeout=20, may_die=[1], **_world(stream))[0]
    assert len(errors) == CALLERS
    for error in [*errors, after]:
        assert type(error) is PeerLost, repr(error)
        assert error.peer == 1


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
    error = run_ranks(2, closes_before_it_begins, name, timeout=20, **_world(processes))[0]
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


@pytest.mark.parametrize(("where", "has_none"), [("rings", True), ("rings", False), ("tcp", False)])
def test_a_call_that_could_not_be_sent_in_time_says_what_it_waited_for(where: str, has_none: bool) -> None:
    for error in run_ranks(2, not_connected, has_none, timeout=20, **_world(where))[0]:
        assert type(error) is px.RpcTimeout, repr(error)
        assert "no connection to the agent of rank 1 within 0.01 s, so nothing was sent: " in str(error)
        assert (error.peer, error.seconds) == (1, 0.01)
