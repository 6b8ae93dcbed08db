"""Errors show the lines of the program that they are about, and none of Phalanx's own."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import phalanx as px
from phalanx import rpc
from phalanx.frames import hides_frames, user_traceback
from phalanx.testing import run_ranks

X = np.ones(3)

CALLS: dict[str, Callable[[px.Group], Any]] = {
    "all_reduce": lambda group: group.all_reduce(X, op="?"),
    "all_reduce_many": lambda group: group.all_reduce_many(3),  # type: ignore[arg-type]
    "reduce": lambda group: group.reduce(X, 9),
    "reduce_scatter": lambda group: group.reduce_scatter("x"),
    "barrier": lambda group: group.barrier(timeout=-1),
    "broadcast": lambda group: group.broadcast(X, 9),
    "all_gather": lambda group: group.all_gather("x"),
    "gather": lambda group: group.gather(X, 9),
    "scatter": lambda group: group.scatter(X, 9),
    "all_to_all": lambda group: group.all_to_all("x"),
    "broadcast_object": lambda group: group.broadcast_object(X, 9),
    "all_gather_object": lambda group: group.all_gather_object(object()),
    "gather_object": lambda group: group.gather_object(X, 9),
    "scatter_object": lambda group: group.scatter_object(3, 0),  # type: ignore[arg-type]
    "send": lambda group: group.send(X, 9),
    "recv": lambda group: group.recv(X, 9),
    "isend": lambda group: group.isend(X, 9),
    "irecv": lambda group: group.irecv(X, 9),
    "sendrecv": lambda group: group.sendrecv(X, 9),
    "send_object": lambda group: group.send_object(X, 9),
    "recv_object": lambda group: group.recv_object(9),
    "subgroup": lambda group: group.subgroup([9]),
    "split": lambda group: group.split("x"),  # type: ignore[arg-type]
    "empty": lambda group: group.empty(-1),
    "wait": lambda group: group.irecv(X, 0, timeout=0.01).wait(),
    "result": lambda group: group.irecv(X, 0, timeout=5).result(),
    "init": lambda group: px.init("nothing"),
    "module": lambda group: px.all_reduce,  # type: ignore[attr-defined]
    "run_ranks": lambda group: run_ranks(0, print),
}


def files_of(error: BaseException) -> set[str]:
    return {frame.filename for frame in traceback.extract_tb(error.__traceback__)}


@pytest.mark.parametrize("name", CALLS)
def test_an_error_that_leaves_a_public_function_has_no_frames_of_ours(name: str) -> None:
    with px.init() as group, pytest.raises((px.PhalanxError, AttributeError)) as caught:
        CALLS[name](group)
    assert files_of(caught.value) == {__file__}


def test_all_frames_are_there_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_DEBUG", "1")
    with px.init() as group, pytest.raises(px.UsageError) as caught:
        group.all_reduce(X, op="?")
    assert len(files_of(caught.value)) > 1
    monkeypatch.setenv("PHALANX_DEBUG", "perhaps")
    with pytest.raises(px.ConfigError, match="PHALANX_DEBUG='perhaps' is not valid"):
        px.init()


def test_remote_calls() -> None:
    with px.init() as group, rpc.Agent(group) as agent:
        agent.register("divide", lambda: 1 / 0)
        with pytest.raises(px.RemoteError) as caught:
            agent.call(0, "divide")
        assert files_of(caught.value) == {__file__}
        assert caught.value.remote_traceback.count("  File ") == 1, "only the function itself"
        with pytest.raises(px.RemoteError) as caught:
            agent.call_async(0, "divide").result()
        assert not any("/src/phalanx/" in name for name in files_of(caught.value))

        async def call() -> None:
            await agent.acall(0, "divide")

        with pytest.raises(px.RemoteError) as caught:
            asyncio.run(call())
        assert not any("/src/phalanx/" in name for name in files_of(caught.value))


def test_a_bug_of_phalanx_keeps_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    from phalanx.group.verbs import reductions

    monkeypatch.setattr(reductions, "adapt", None)
    with px.init() as group, pytest.raises(TypeError) as caught:
        group.all_reduce(X)
    assert any(name.endswith("reductions.py") for name in files_of(caught.value))


def test_frames_of_the_program_stay_on_both_sides() -> None:
    @hides_frames
    def through() -> None:
        inner()

    def inner() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        through()
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[-2:] == ["through", "inner"]
    assert "call" not in names, "the decorator's"


def test_causes_lose_their_frames_as_well() -> None:
    with px.init() as group:
        try:
            try:
                group.all_reduce(X, op="?")
            except px.UsageError as error:
                raise RuntimeError("mine") from error
        except RuntimeError as error:
            text = user_traceback(error)
    assert "src/phalanx" not in text
    assert "direct cause" in text


@pytest.mark.parametrize("debug", ["0", "1"])
@pytest.mark.parametrize("name", CALLS)
def test_the_programs_own_error_stays_with_one_that_follows_in_finally(
    monkeypatch: pytest.MonkeyPatch, name: str, debug: str
) -> None:
    monkeypatch.setenv("PHALANX_DEBUG", debug)

    def fail(group: px.Group) -> None:
        try:
            raise KeyError("the reason")
        finally:
            CALLS[name](group)

    with px.init() as group, pytest.raises((px.PhalanxError, AttributeError)) as caught:
        fail(group)
    assert "KeyError: 'the reason'" in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("name", CALLS)
def test_errors_of_phalanx_that_led_to_one_are_not_shown(name: str) -> None:
    with px.init() as group, pytest.raises((px.PhalanxError, AttributeError)) as caught:
        CALLS[name](group)
    assert "".join(traceback.format_exception(caught.value)).count("Traceback (most recent call last)") == 1
