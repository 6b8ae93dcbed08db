"""Objects that live on another rank: made, used, and freed when nobody can use them any more."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import pickle
import signal
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from tests.lateness import bound
from tests.rpc.support import error_of, run, until

import phalanx as px
from phalanx.errors import FunctionNotFound, InvalidArgument, PeerLost, RemoteError, Timeout
from phalanx.rpc import Agent, RemoteObject
from phalanx.testing import run_ranks

made: list[weakref.ref[Any]] = []


class Base:
    def inherited(self) -> str:
        return type(self).__name__


class Counter(Base):
    limit = 1000

    def __init__(self, start: int = 0) -> None:
        made.append(weakref.ref(self))
        self.value = start

    def increment(self, by: int = 1) -> int:
        self.value += by
        return self.value

    async def increment_soon(self, by: int = 1) -> int:
        await asyncio.sleep(0.001)
        return self.increment(by)

    def upto(self, n: int) -> Iterator[int]:
        yield from range(self.value, self.value + n)

    def fail(self) -> None:
        raise ValueError(f"at {self.value}")

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    @staticmethod
    def twice(x: int) -> int:
        return 2 * x

    @classmethod
    def kind(cls) -> str:
        return cls.__name__

    @property
    def secret(self) -> int:
        return self.value

    def _private(self) -> int:
        return self.value


class Slow:
    def __init__(self, seconds: float) -> None:
        made.append(weakref.ref(self))
        time.sleep(seconds)


class Broken:
    def __init__(self) -> None:
        made.append(weakref.ref(self))
        raise ValueError("it cannot be made")


def alive() -> int:
    gc.collect()
    return sum(reference() is not None for reference in made)


def serve(agent: Agent) -> None:
    for target in (Counter, Slow, Broken, alive):
        agent.register(target)
    agent.register("plain", lambda: 1)
    agent.register("made", lambda: len(made))


def use(agent: Agent) -> None:
    for dst in range(2):
        counter = agent.create(dst, "Counter", start=10)
        assert isinstance(counter, RemoteObject)
        assert f"rank {dst}" in repr(counter)
        assert "Counter" in repr(counter)
        assert counter.increment() == 11
        assert counter.increment(by=4) == 15
        assert counter.increment.call_async(5).result(5) == 20
        assert asyncio.run(counter.increment.acall(1)) == 21
        assert counter.increment_soon(1) == 22
        counter.increment.notify(8)
        until(lambda counter=counter: counter.increment(0) == 30, "a notification")
        assert list(counter.upto(3)) == [30, 31, 32]
        assert counter.inherited() == "Counter"
        assert counter.twice(4) == 8
        assert counter.kind() == "Counter"
        other = agent.create(dst, "Counter")
        assert other.increment() == 1
        assert counter.increment(0) == 30
        error = error_of(counter.fail)
        assert isinstance(error, RemoteError)
        assert "at 30" in str(error)
        began = time.monotonic()
        late = error_of(counter.sleep, 0.5, timeout=0.1)
        assert isinstance(late, Timeout)
        assert time.monotonic() - began < bound(0.45)
        assert isinstance(error_of(counter.increment, "x"), InvalidArgument)


def test_methods(where: str) -> None:
    run(where, 2, serve, use)


def out_of_reach(agent: Agent) -> None:
    counter: Any = agent.create(1, "Counter")
    for name in ("_private", "__init__", "__class__", "__dict__"):
        if not hasattr(RemoteObject, name):
            assert isinstance(error_of(getattr, counter, name), AttributeError)
        forced = error_of(agent._call, counter._link, name, counter._number, (), {}, 5.0, None)
        assert isinstance(forced, FunctionNotFound), name
    for name in ("nothing", "value", "limit", "secret"):
        assert isinstance(error_of(getattr(counter, name)), FunctionNotFound), name
    for name in ("plain", "Nothing"):
        assert isinstance(error_of(agent.create, 1, name), FunctionNotFound)
    refused = error_of(agent.call, 1, "Counter")
    assert isinstance(refused, FunctionNotFound)
    assert "create" in str(refused)
    assert isinstance(error_of(agent.create, 1, "Counter", begin=3), InvalidArgument)
    assert isinstance(error_of(agent.create, 1, "Counter", start="x"), InvalidArgument)
    assert isinstance(error_of(agent.create, 1, "Broken"), RemoteError)


def test_what_cannot_be_reached(where: str) -> None:
    run(where, 2, serve, out_of_reach)


def freed(agent: Agent) -> None:
    handles = [agent.create(1, "Counter", number) for number in range(20)]
    assert agent.call(1, "alive") == 20
    del handles[10:]
    gc.collect()
    until(lambda: agent.call(1, "alive") == 10, "half of them to be freed")
    assert [handle.increment() for handle in handles] == list(range(1, 11))
    method = handles[0].increment
    handles.clear()
    until(lambda: agent.call(1, "alive") == 1, "all but one to be freed")
    assert method() == 2  # it holds its object
    del method
    until(lambda: agent.call(1, "alive") == 0, "the last to be freed")


def test_freed_with_its_handle(processes: str) -> None:
    run(processes, 2, serve, freed)


def not_before_its_calls(agent: Agent) -> list[Any]:
    """The handle is gone at once, but what was called through it is still to be run."""
    futures = []
    for _ in range(20):
        handle = agent.create(1, "Counter")
        futures += [handle.increment.call_async() for _ in range(20)]
        del handle
    answers = [future.exception(10) or future.result() for future in futures]
    until(lambda: agent.call(1, "alive") == 0, "all to be freed")
    return answers


def test_freed_after_the_calls_that_were_made_before(processes: str) -> None:
    assert run(processes, 2, serve, not_before_its_calls, workers=1) == [*range(1, 21)] * 20


def too_late(agent: Agent) -> int:
    """The caller gives up while the object is being made: nobody will ever have its handle."""
    for _ in range(3):
        assert isinstance(error_of(agent.create, 1, "Slow", 0.3, timeout=0.1), Timeout)
    time.sleep(1.0)
    return int(agent.call(1, "alive"))


def test_freed_if_its_maker_gave_up(processes: str) -> None:
    assert run(processes, 2, serve, too_late) == 0


def answered_too_late(agent: Agent) -> None:
    assert agent.call(1, "alive") == 0
    link = agent._connections.callers[1]
    link.mover_lock.acquire()  # so nobody reads the answer, which names the object
    try:
        assert isinstance(error_of(agent.create, 1, "Counter", timeout=0.3), Timeout)
    finally:
        link.hand_over()
    until(lambda: agent.call(1, "alive") == 0, "an object that nobody has heard of to be freed")


def test_an_object_whose_maker_has_given_up(processes: str) -> None:
    run(processes, 2, serve, answered_too_late)


def die_with_objects(world: px.Group) -> Any:
    asked = threading.Event()
    with px.rpc.Agent(world) as agent:
        serve(agent)
        agent.register("done", asked.set)
        world.barrier()
        if world.rank == 0:
            handles = [agent.create(1, "Counter") for _ in range(5)]
            assert len(handles) == 5
            os.kill(os.getpid(), signal.SIGKILL)
        if world.rank == 1:
            until(lambda: len(made) == 5, "the objects")
            until(lambda: alive() == 0, "their end", 3.0)
            assert asked.wait(20)  # the group is broken, so rank 2 says by a call that it is done with this agent
        if world.rank == 2:
            until(lambda: agent.call(1, "made") == 5 and agent.call(1, "alive") == 0, "the objects' end")
            result = agent.call(1, "plain")
            agent.call(1, "done")
            return result
    return None


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_freed_when_their_holder_dies(transport: str) -> None:
    options = px.Options(transport=transport)
    results = run_ranks(3, die_with_objects, backend="mesh", may_die=[0], options=options, timeout=30)
    assert results[2] == 1


def close_with_objects(world: px.Group) -> Any:
    agent = px.rpc.Agent(world)
    serve(agent)
    world.barrier()
    error: BaseException | None = None
    if world.rank == 0:
        counter = agent.create(1, "Counter")
        assert counter.increment() == 1
        world.barrier()
        world.barrier()
        began = time.monotonic()
        error = error_of(counter.increment)
        assert time.monotonic() - began < bound(1.0)
        agent.close()
        del counter
        gc.collect()
    else:
        world.barrier()
        assert alive() == 1
        agent.close()
        assert alive() == 0
        world.barrier()
    return type(error)


@pytest.mark.parametrize("kind", ["mesh", "simulated"])
def test_freed_when_their_owner_closes(kind: str) -> None:
    made.clear()
    error = run_ranks(2, close_with_objects, backend=kind, timeout=30)[0]
    assert issubclass(error, PeerLost | px.errors.Cancelled)


def close_the_holder(world: px.Group) -> None:
    agent = px.rpc.Agent(world)
    serve(agent)
    world.barrier()
    if world.rank == 0:
        counter = agent.create(1, "Counter")
        agent.close()
        assert isinstance(error_of(counter.increment), px.PhalanxError)
    else:
        until(lambda: made, "the object")
        until(lambda: alive() == 0, "its end")
    world.barrier()
    agent.close()


def test_freed_when_their_holder_closes() -> None:
    run_ranks(2, close_the_holder, backend="mesh", timeout=30)


def copy_handles(world: px.Group) -> None:
    with px.rpc.Agent(world) as agent:
        serve(agent)
        world.barrier()
        counter = agent.create(1 - world.rank, "Counter")
        for same in (copy.copy(counter), copy.deepcopy([counter])[0]):
            assert same is counter
        assert isinstance(error_of(lambda: pickle.dumps(counter)), TypeError)
        assert counter.increment() == 1
        for name in (5, None, b"Counter", ["Counter"]):
            for call in (agent.call, agent.call_async, agent.notify, agent.create):
                assert isinstance(error_of(lambda name=name, call=call: call(1, name)), px.errors.UsageError), name
        for rank in (True, False):
            assert isinstance(error_of(lambda rank=rank: agent.call(rank, "increment")), px.errors.InvalidRank)
        world.barrier()


def test_copies_of_a_handle_and_odd_names() -> None:
    run_ranks(2, copy_handles, backend="mesh", timeout=30)


def test_an_agent_of_something_else() -> None:
    with pytest.raises(px.errors.UsageError, match="group='x' is not valid"):
        px.rpc.Agent("x")  # type: ignore[arg-type]


def call_what_is_gone(group: px.Group) -> list[int]:
    """How deep the tracebacks are of calls to an object whose rank has closed its agent."""
    agent = px.rpc.Agent(group)
    agent.register("Counter", Counter)
    group.barrier()
    depths = []
    if group.rank == 0:
        counter = agent.create(1, "Counter")
        group.barrier()
        group.barrier()
        for number in range(60):
            try:
                counter.increment() if number % 2 else counter.increment.call_async().result()
            except px.PeerLost as error:
                depths.append(len(list(traceback.walk_tb(error.__traceback__))))
    else:
        group.barrier()
        agent.close()
        group.barrier()
    group.barrier()
    agent.close()
    return depths


def test_every_call_to_what_is_gone_raises_an_error_of_its_own() -> None:
    """If it were the link's, its traceback would grow with each, and keep alive what the frames in it hold."""
    depths = run_ranks(2, call_what_is_gone, backend="mesh")[0]
    assert len(depths) == 60
    assert max(depths) < 20
