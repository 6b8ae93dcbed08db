"""A short version of the soak of remote calls (`make calls`), and a proof that it can fail."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console
from tests.soak import calls, calls_rank

import phalanx as px
from phalanx.rpc import Agent
from phalanx.testing import run_ranks


@pytest.fixture
def console() -> Console:
    """Keeps what is printed."""
    return Console(file=io.StringIO(), width=300)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_calls_of_all_kinds(processes: str, console: Console) -> None:
    transport = "tcp" if processes == "tcp" else "auto"
    assert calls.run_calls(2000, 3, transport, "small", console, short=True), printed(console)
    for outcome in ("answered", "cancelled", "RpcTimeout", "RemoteError", "FunctionNotFound", "InvalidArgument"):
        assert f" {outcome}" in printed(console)


def test_a_rank_killed_under_load(console: Console) -> None:
    assert calls.run_kills(1, 3, "auto", "small", console), printed(console)


def test_a_flood(console: Console) -> None:
    assert calls.run_flood(1.0, "auto", console), printed(console)


def lying(world: px.Group) -> list[str]:
    """A rank that answers one call in five with something else: which calls these are is left to the threads."""
    with Agent(world, timeout=20) as agent:
        served = calls_rank.Served(agent)
        agent.unregister("echo")
        agent.register("echo", lambda number, value: value if number % 5 else None)
        world.barrier()
        findings = [calls_rank.Findings() for _ in range(calls_rank.THREADS)]
        calls_rank._in_threads(agent, "lies", findings, -1, lambda done: done < 100)
        world.barrier()
        assert not served.twice
    return calls_rank._merge(findings).wrong


def test_a_wrong_answer_is_found() -> None:
    results: list[Any] = run_ranks(2, lying, backend="mesh", timeout=40)
    wrong = [words for result in results for words in result]
    assert wrong
    assert all("echo" in words for words in wrong), wrong
