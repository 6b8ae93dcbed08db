"""An agent that its program has dropped without closing it ends: its threads, and the calls of others."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import pytest
from tests.rpc.support import error_of, until

import phalanx as px
from phalanx.errors import ChannelClosed, RemoteError, RpcError
from phalanx.rpc import Agent, ClassicAgent
from phalanx.testing import run_ranks

THREADS = ("phalanx-rpc", "phalanx-agent", "phalanx-calls")


def threads() -> list[str]:
    """The threads of agents in this process."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(THREADS)]


class Thing:
    def __init__(self, agent: Agent) -> None:
        self.agent = agent


def serve(agent: Agent) -> None:
    """Functions and objects that refer to the agent, as most do."""
    agent.register("rank", lambda: agent.rank)
    agent.register("soon", lambda: agent.call_async(0, "rank").result(5))
    agent.register("thing", type("thing", (Thing,), {"__init__": lambda self: Thing.__init__(self, agent)}))


def dropped(world: px.Group) -> None:
    agent = Agent(world, timeout=20)
    serve(agent)
    world.barrier()
    handle = None
    if world.rank == 0:
        assert agent.call(1, "rank") == 1
        assert agent.call(1, "soon") == 0
        handle = agent.create(1, "thing")
    world.barrier()
    began = time.monotonic()
    if world.rank == 1:
        known = weakref.ref(agent)
        del agent
        # A thread that has just answered may still hold the object that the handler returned, and with it the agent.
        until(lambda: gc.collect() >= 0 and known() is None, "the agent to be collected", 5)
        until(lambda: not threads(), f"{threads()} to end", 5)
    else:
        # Its next call finds nobody. What is under way at that moment, or comes just after it, is told so.
        until(lambda: isinstance(_outcome(agent), RpcError | ChannelClosed), "a word", 10)
        assert time.monotonic() - began < 10
        assert handle is not None
        agent.close()
    world.barrier()


def _outcome(agent: Agent) -> Any:
    try:
        return agent.call(1, "rank", timeout=1)
    except px.PhalanxError as error:
        return error


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_an_agent(transport: str) -> None:
    run_ranks(2, dropped, backend="mesh", options=px.Options(transport=transport), timeout=40)


def make_classic(world: px.Group, inside: threading.Event, go: threading.Event) -> ClassicAgent:
    def wait(_: bytes) -> bytes:
        inside.set()
        assert go.wait(10)
        return b"done"

    agent = ClassicAgent(world, functions={"wait": wait}, workers=1)
    agent.register("rank", lambda _: str(agent.rank).encode())
    return agent


def dropped_classic(world: px.Group) -> None:
    inside, go = threading.Event(), threading.Event()
    agent = make_classic(world, inside, go)
    world.barrier()
    if world.rank == 0:
        first = agent.call_async(1, "wait")
        second = agent.call_async(1, "wait")  # waits for the only worker
        error = error_of(second.result, 10)
        assert isinstance(error, RemoteError), error
        assert "serves no more calls" in str(error)
        assert first.result(10) == b"done"  # what runs may finish
        agent.close()
    else:
        assert inside.wait(10)
        time.sleep(0.1)
        calls = weakref.ref(agent._calls)
        del agent
        gc.collect()
        until(lambda: calls() is None or calls().client._closed, "the end to begin")  # type: ignore[union-attr]
        go.set()
        until(lambda: calls() is None or calls()._stopping, "the end", 10)  # type: ignore[union-attr]
    world.barrier()
    with ClassicAgent(world, functions={"echo": bytes}) as again:  # the messages of the backend are nobody's again
        world.barrier()
        assert again.call(1 - world.rank, "echo", b"x") == b"x"
        world.barrier()


@pytest.mark.parametrize("backend", ["simulated", "mesh-classic"])
def test_a_classic_agent(backend: str) -> None:
    run_ranks(2, dropped_classic, backend=backend, timeout=40)
    until(lambda: not threads(), f"{threads()} to end", 10)
