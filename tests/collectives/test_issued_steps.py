"""Asynchronous collectives over TCP: the thread that waits does them, and leaves to the group's what lasts."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import phalanx as px
from phalanx._native import core
from phalanx.deadline import Deadline
from phalanx.group.worker import IssuedWork, QueuedWork
from phalanx.testing import run_ranks

TCP = {"PHALANX_TRANSPORT": "tcp"}

pytestmark = pytest.mark.skipif(core is None, reason="the fast path is the native core's")


def _calls(group: px.Group, **how: Any) -> dict[str, Callable[[], Any]]:
    """Every verb that can be issued, by its name, on arrays of its own."""
    rank, n = group.rank, group.world_size
    row = np.arange(3.0) + rank
    rows = np.arange(3.0 * n).reshape(n, 3) * (rank + 1)
    out, part = np.zeros((n, 3)), np.zeros((1, 3))
    return {
        "all_reduce": lambda: group.all_reduce(row.copy(), **how),
        "mean": lambda: group.all_reduce(row.copy(), "mean", **how),
        "reduce": lambda: group.reduce(row.copy(), n - 1, "mean", **how),
        "broadcast": lambda: group.broadcast(row.copy(), n - 1, **how),
        "all_gather": lambda: group.all_gather(row.reshape(1, 3), out.copy(), **how),
        "reduce_scatter": lambda: group.reduce_scatter(rows, "mean", part.copy(), **how),
        "all_to_all": lambda: group.all_to_all(rows, out.copy(), **how),
        "gather": lambda: group.gather(row.reshape(1, 3), 1, out.copy() if rank == 1 else None, **how),
        "barrier": lambda: group.barrier(**how),
    }


def _expected(group: px.Group) -> dict[str, Any]:
    """The results of the blocking calls, after which every channel is there."""
    for _ in range(3):
        results = {name: call() for name, call in _calls(group).items()}
    return results


def _check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, result in expected.items():
        same = found[name] is result or np.array_equal(found[name], result)
        assert same, f"{name}: {found[name]} instead of {result}"


def _in_turn(group: px.Group) -> None:
    expected = _expected(group)
    found = {}
    for name, call in _calls(group, async_op=True).items():
        work = call()
        assert type(work) is IssuedWork, name
        found[name] = work.wait()
    _check(found, expected)
    issued = {name: call() for name, call in _calls(group, async_op=True).items()}
    last = group.all_reduce(np.ones(2))  # behind all of them
    _check({name: work.wait() for name, work in issued.items()}, expected)
    assert last[0] == group.world_size


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_verb_is_issued(n: int) -> None:
    run_ranks(n, _in_turn, backend="mesh", env=TCP)


def _is_late(group: px.Group) -> None:
    expected = _expected(group)
    found = {}
    for name, call in _calls(group, async_op=True).items():
        if group.rank == 1:
            time.sleep(0.1)  # longer than the waiting thread does it
        found[name] = call().wait()
    _check(found, expected)


def test_the_groups_thread_goes_on_with_what_lasts() -> None:
    run_ranks(3, _is_late, backend="mesh", env=TCP)


def _while_channels_are_held(group: px.Group) -> None:
    expected = _expected(group)
    lane = group._collectives
    others = [rank for rank in range(group.world_size) if rank != group.rank]
    locks = [lane.outbound(rank, Deadline(10)).lock for rank in others]
    found = {}
    for name, call in _calls(group, async_op=True).items():
        held, let_go = threading.Event(), threading.Event()

        def hold(held: threading.Event = held, let_go: threading.Event = let_go) -> None:
            with contextlib.ExitStack() as stack:
                for lock in locks:
                    stack.enter_context(lock)
                held.set()
                let_go.wait()

        holder = threading.Thread(target=hold)
        holder.start()
        held.wait()
        work = call()
        timer = threading.Timer(0.02, let_go.set)
        timer.start()
        found[name] = work.wait()
        holder.join()
        timer.join()
    _check(found, expected)


def test_the_general_way_does_it_while_another_thread_has_a_channel() -> None:
    run_ranks(3, _while_channels_are_held, backend="mesh", env=TCP)


def _nobody_waits(group: px.Group) -> None:
    _expected(group)
    work = group.all_reduce(np.ones(4), async_op=True)
    until = time.monotonic() + 10
    while not work.done() and time.monotonic() < until:
        time.sleep(0.001)
    assert work.result()[0] == group.world_size


def test_it_ends_though_no_thread_waits() -> None:
    run_ranks(2, _nobody_waits, backend="mesh", env=TCP)


class _Enough(Exception):
    pass


def _interrupted(group: px.Group) -> None:
    _expected(group)
    if group.rank == 1:
        time.sleep(0.5)
        assert group.all_reduce(np.ones(4))[0] == 2
        return

    def stop(*_: object) -> None:
        raise _Enough

    signal.signal(signal.SIGALRM, stop)
    work = group.all_reduce(np.ones(4), async_op=True)
    began = time.monotonic()
    with pytest.raises(_Enough):  # noqa: PT012 - the alarm may come at once
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        work.wait()
    assert time.monotonic() - began < 0.4
    assert work.wait()[0] == 2


def test_an_interrupt_ends_the_wait_but_not_the_collective() -> None:
    run_ranks(2, _interrupted, backend="mesh", env=TCP)


def _out_of_time(group: px.Group) -> str:
    _expected(group)
    if group.rank == 1:
        time.sleep(1.0)
        return ""
    work = group.all_reduce(np.ones(4), timeout=0.3, async_op=True)
    with pytest.raises(px.Timeout) as raised:
        work.wait()
    assert list(raised.value.missing) == [1]
    return str(raised.value)


def test_it_names_the_rank_that_did_not_come_in_time() -> None:
    assert "not done within 0.3 s" in run_ranks(2, _out_of_time, backend="mesh", env=TCP)[0]


def _parts(group: px.Group) -> str:
    _expected(group)
    work: Any = group.all_reduce(np.ones(4 + group.rank), async_op=True)
    with pytest.raises(px.Desync) as raised:
        work.wait()
    return str(raised.value)


def test_ranks_that_differ_hear_of_each_other() -> None:
    first, second = run_ranks(2, _parts, backend="mesh", env=TCP)
    assert "float64[4]" in first
    assert "float64[5]" in first
    assert "float64[5]" in second


def _scatters(group: px.Group) -> None:
    out = np.zeros(2)
    for _ in range(3):
        group.scatter(np.arange(4.0) if group.rank == 0 else None, 0, out)
    work = group.scatter(np.arange(4.0) if group.rank == 0 else None, 0, out * 0, async_op=True)
    assert type(work) is QueuedWork
    assert work.wait()[0] == 2.0 * group.rank


def test_a_scatter_goes_the_general_way() -> None:
    run_ranks(2, _scatters, backend="mesh", env=TCP)
