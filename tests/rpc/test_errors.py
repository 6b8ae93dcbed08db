"""The caller hears of every exception at once, whatever it is, and by a type that it can catch."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.rpc.support import error_of, run, until

import phalanx as px
from phalanx.errors import NoConnection, RemoteError, RpcError, Timeout
from phalanx.rpc import Agent, ClassicAgent, current_call
from phalanx.testing import run_ranks


class NoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class NoName(type):
    def __getattribute__(cls, name: str) -> Any:
        if name in ("__name__", "__qualname__", "__module__"):
            raise RuntimeError("no name")
        return super().__getattribute__(name)


class OddClass(Exception, metaclass=NoName):
    pass


class NoCopy(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("no pickle")

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("no copy")


class Stop(BaseException):
    pass


def with_cause() -> Exception:
    error = ValueError("outer")
    error.__cause__ = NoText()
    return error


ODD: dict[str, tuple[Callable[[], BaseException], str, str]] = {
    "no text": (NoText, "NoText", "its text cannot be shown: RuntimeError in __str__"),
    "argument without text": (lambda: ValueError(NoText()), "ValueError", "cannot be shown"),
    "cause without text": (with_cause, "ValueError", "outer"),
    "odd class": (lambda: OddClass("told"), "OddClass", "told"),
    "surrogate": (lambda: ValueError("file \udce4.txt"), "ValueError", r"file \udce4.txt"),
    "no copy": (lambda: NoCopy("told"), "NoCopy", "told"),
    "a BaseException": (lambda: Stop("told"), "Stop", "told"),
    "SystemExit": (lambda: SystemExit(3), "SystemExit", "3"),
    "KeyboardInterrupt": (lambda: KeyboardInterrupt("told"), "KeyboardInterrupt", "told"),
    "GeneratorExit": (lambda: GeneratorExit("told"), "GeneratorExit", "told"),
    "StopIteration": (lambda: StopIteration("told"), "StopIteration", "told"),
}


@dataclasses.dataclass
class OddField:
    value: int = 1

    def __getattribute__(self, name: str) -> Any:
        if name == "value":
            raise StopIteration("told")
        return super().__getattribute__(name)


@dataclasses.dataclass
class Refuses:
    value: int

    def __post_init__(self) -> None:
        raise NoText


def serve(agent: Agent) -> None:
    def fail(name: str) -> None:
        make = ODD[name][0]
        raise make()

    agent.register("fail", fail)

    @agent.register("fail soon")
    async def fail_soon(name: str) -> None:
        fail(name)

    @agent.register("items")
    def items(name: str) -> Iterator[int]:
        yield 1
        fail(name)

    @agent.register("items soon")
    async def items_soon(name: str) -> AsyncIterator[int]:
        yield 1
        fail(name)

    @agent.register("odd results")
    def odd_results(stream: bool) -> Any:
        return iter_of(OddField()) if stream else OddField()

    agent.register("typed", lambda x: x)
    agent.register("refuse", refuse)
    agent.register("cancelled", cancelled)
    agent.register("one", lambda: {"value": 1})


def iter_of(value: Any) -> Iterator[Any]:
    yield 1
    yield value


def refuse(x: Refuses) -> None:
    raise AssertionError(x)


def cancelled() -> None:
    call = current_call()
    assert call is not None

    told = threading.Event()

    def fail() -> None:
        told.set()
        raise NoText

    call.on_cancel(fail)
    told.wait(10)  # and not for the deadline of the call, which passes here as well


def odd_errors(agent: Agent) -> None:
    for name, (_, type_name, words) in ODD.items():
        for how in ("fail", "fail soon", "items", "items soon"):
            began = time.monotonic()
            error = error_of(lambda how=how, name=name: _all(agent.call(1, how, name)))
            assert isinstance(error, RemoteError), (name, how, error)
            assert time.monotonic() - began < 5, (name, how)
            if name not in ("StopIteration", "GeneratorExit") or how == "fail":  # Python replaces them elsewhere
                assert error.remote_type == type_name, (name, how)
                assert words in str(error), (name, how)
            str(error).encode()
    for stream in (False, True):
        assert isinstance(error_of(lambda stream=stream: _all(agent.call(1, "odd results", stream))), RemoteError)
    refused = error_of(agent.call, 1, "refuse", {"value": 1})
    assert isinstance(refused, px.InvalidArgument)
    assert "NoText" in str(refused)
    refused = error_of(agent.call_async(1, "one", returns=Refuses).result, 5)
    assert isinstance(refused, px.InvalidArgument)


def _all(result: Any) -> list[Any]:
    return list(result) if isinstance(result, px.rpc.RemoteStream) else [result]


def test_the_caller_hears_of_every_exception(processes: str) -> None:
    run(processes, 2, serve, odd_errors, timeout=10)


def test_a_notification_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "phalanx.rpc")

    def act(agent: Agent) -> None:
        agent.notify(1, "fail", "no text")
        until(lambda: "failed: NoText" in caplog.text, "the word")

    run("simulated", 2, serve, act)


def give_up(agent: Agent) -> None:
    assert isinstance(error_of(agent.call, 1, "cancelled", timeout=0.1), Timeout)
    assert agent.call(1, "typed", 1) == 1  # on the same link: the callback that failed has not ended it
    assert len(agent._connections.callers) == 1


def test_a_callback_that_fails_does_not_end_the_link(caplog: pytest.LogCaptureFixture) -> None:
    run("simulated", 2, serve, give_up)
    assert "a callback of a cancelled call of 'cancelled' failed" in caplog.text


# -- types -----------------------------------------------------------------------------------------------------------


def too_late(agent: Agent) -> None:
    for error in (
        error_of(agent.call, 1, "cancelled", timeout=0.1),
        error_of(agent.call_async(1, "cancelled", timeout=0.1).result),
    ):
        assert isinstance(error, RpcError)
        assert isinstance(error, Timeout)
        assert isinstance(error, TimeoutError)
        assert error.seconds == 0.1
        assert error.missing == (1,)


def test_a_deadline_is_an_error_of_calls() -> None:
    run("simulated", 2, serve, too_late)


def no_way(agent: Agent) -> None:
    if agent.rank == 1:
        for act in (agent.call, agent.notify, lambda *args: agent.call_async(*args).result(5)):
            error = error_of(act, 2, "typed", 1)
            assert isinstance(error, RpcError), (type(error), error)
            assert isinstance(error, NoConnection)
            assert isinstance(error, ConnectionError)


def test_no_way_is_an_error_of_calls() -> None:
    run("star", 3, serve, no_way, everyone=True)


def no_agent(world: px.Group) -> None:
    if world.rank == 0:
        with px.rpc.Agent(world) as agent:
            error = error_of(agent.call, 1, "typed", 1, timeout=0.2)
            assert isinstance(error, RpcError)
            assert isinstance(error, Timeout)
            assert error.seconds == 0.2
    world.barrier()


def test_no_agent_is_an_error_of_calls() -> None:
    run_ranks(2, no_agent, backend="mesh", timeout=30)


# -- the classic wire --------------------------------------------------------------------------------------------------


def classic(world: px.Group) -> None:
    def fail(name: bytes) -> bytes:
        make = ODD[name.decode()][0]
        raise make()

    def says(name: bytes) -> bytes:
        raise ValueError("function 'other' not registered on rank 1")

    with ClassicAgent(world, functions={"fail": fail, "says": says, "wait": lambda _: time.sleep(0.5) or b""}) as agent:
        world.barrier()
        if world.rank == 0:
            for name, (_, _, words) in ODD.items():
                error = error_of(agent.call, 1, "fail", name.encode(), timeout=10)
                assert isinstance(error, RemoteError), (name, error)
                assert words in str(error), name
            late = error_of(agent.call, 1, "wait", timeout=0.05)
            assert isinstance(late, RpcError)
            assert isinstance(late, Timeout)
            assert late.seconds == 0.05
            for missing in (error_of(agent.call, 1, "nothing"), agent.call_async(1, "nothing").exception(5)):
                assert isinstance(missing, px.FunctionNotFound)
                assert isinstance(missing, RemoteError)  # what programs written to the wire catch
                assert str(missing) == "function 'nothing' not registered on rank 1"
                assert missing.peer == 1
            assert not isinstance(error_of(agent.call, 1, "says"), px.FunctionNotFound)
        world.barrier()


@pytest.mark.parametrize("backend", ["simulated", "mesh-classic"])
def test_the_classic_wire(backend: str) -> None:
    run_ranks(2, classic, backend=backend, timeout=40)


def classic_star(world: px.Group) -> None:
    with ClassicAgent(world) as agent:
        world.barrier()
        if world.rank == 1:
            error = error_of(agent.call, 2, "nothing")
            assert isinstance(error, RpcError)
            assert isinstance(error, NoConnection)
        world.barrier()
    assert np.all(world.all_reduce(np.ones(1)) == 3)


def test_the_classic_star() -> None:
    run_ranks(3, classic_star, backend="tcp", timeout=40)
