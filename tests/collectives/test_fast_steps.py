"""The fast path of collectives over TCP: it is used, it hands over what lasts, and it fails as the general way does."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import numpy as np
import pytest

import phalanx as px
from phalanx._native import core
from phalanx.algorithms import chunk_bounds, select
from phalanx.errors import PeerLost
from phalanx.group.engines.steps.layout import OUT, X, cut
from phalanx.testing import run_ranks

TCP = {"PHALANX_TRANSPORT": "tcp"}

pytestmark = pytest.mark.skipif(core is None, reason="the fast path is the native core's")


def _each_verb(group: px.Group) -> list[Any]:
    rank, n = group.rank, group.world_size
    row = np.arange(3.0) + rank
    rows = np.arange(3.0 * n).reshape(n, 3) * (rank + 1)
    out, part = np.zeros((n, 3)), np.zeros((1, 3))
    return [
        group.all_reduce(row.copy()),
        group.all_reduce(row.copy(), "mean"),
        group.reduce(row.copy(), n - 1, "max") if rank == n - 1 else group.reduce(row.copy(), n - 1, "max") * 0,
        group.broadcast(row.copy(), n - 1),
        group.all_gather(row.reshape(1, 3), out.copy()),
        group.reduce_scatter(rows, "mean", part.copy()),
        group.all_to_all(rows, out.copy()),
        group.gather(row.reshape(1, 3), 1, out.copy() if rank == 1 else None),
        group.barrier(),
    ]


def _twice(group: px.Group) -> list[str]:
    for _ in range(3):  # the first connects
        group.barrier()
        slow = _each_verb(group)
    assert group._recorder is not None
    before = group._recorder.sequence
    fast = _each_verb(group)
    used = [record[0] for record in group._recorder.records() if record[6] > before]
    for one, other in zip(slow, fast, strict=True):
        assert one is other or (one == other).all()
    at_root = np.repeat(np.arange(group.world_size), 3).reshape(-1, 3) + np.arange(3.0)
    assert fast[-2] is None if group.rank != 1 else (fast[-2] == at_root).all()
    return used


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_verb_takes_it(n: int) -> None:
    verbs = ["all_reduce"] * 2 + ["reduce", "broadcast", "all_gather", "reduce_scatter"]
    verbs += ["all_to_all", "gather", "barrier"]
    assert run_ranks(n, _twice, backend="mesh", env=TCP) == [verbs] * n


def _waits(group: px.Group) -> float:
    x = np.ones(2)
    for _ in range(3):
        group.all_reduce(x)
    if group.rank == 1:
        time.sleep(0.3)  # longer than the fast path waits
    return float(group.all_reduce(np.ones(2))[0])


def test_a_wait_that_lasts_goes_on_in_python() -> None:
    assert run_ranks(3, _waits, backend="mesh", env=TCP) == [3.0] * 3


class _Enough(Exception):
    pass


def _interrupted(group: px.Group) -> str:
    for _ in range(3):
        group.barrier()
    if group.rank == 1:
        time.sleep(0.5)
        with pytest.raises(PeerLost) as raised:
            group.barrier()
        return str(raised.value)

    def stop(*_: object) -> None:
        raise _Enough

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.02)  # while the core still waits
    began = time.monotonic()
    with pytest.raises(_Enough):
        group.barrier()
    assert time.monotonic() - began < 0.4
    return ""


def test_an_interrupt_ends_it_for_everybody() -> None:
    assert "_Enough" in run_ranks(2, _interrupted, backend="mesh", env=TCP)[1]


def _from_two_threads(group: px.Group) -> None:
    def work() -> None:
        for _ in range(200):
            results.append(group.all_reduce(np.ones(5))[0])

    results: list[float] = []
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [2.0] * 400


def test_two_threads_take_turns() -> None:
    run_ranks(2, _from_two_threads, backend="mesh", env=TCP)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_parts_of_a_ring_are_those_of_the_engine(size: int) -> None:
    found = cut("all_reduce", "ring", 0, size, 0, 10, 4)
    cuts = [(chunk.offset // 4, (chunk.offset + chunk.size) // 4) for chunk in found.chunks.values()]
    assert cuts == list(chunk_bounds(10, size))
    assert {chunk.place for chunk in found.chunks.values()} == {X}


def test_all_to_all_copies_its_own_part() -> None:
    found = cut("all_to_all", "linear", 1, 3, 0, 9, 8)
    assert list(found.copies) == [(24, X, 24, OUT, 24)]
    assert sorted(found.chunks) == [1, 3, 5, 7]


@pytest.mark.parametrize("name", ["bruck", "pairwise", "linear"])
def test_every_chunk_of_a_schedule_has_a_place(name: str) -> None:
    for rank in range(9):
        schedule = select.schedule("all_to_all", name, rank, 9)
        used = {t.chunk for step in schedule.steps for t in (*step.sends, *step.recvs)}
        assert used <= set(cut("all_to_all", name, rank, 9, 0, 9, 4).chunks)
