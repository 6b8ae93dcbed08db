"""The fast path of collectives over TCP: it is used, it hands over what lasts, and it fails as the general way does."""

from __future__ import annotations

import resource
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
from phalanx.group.engines.base import SHORT_PART
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
        group.scatter(rows if rank == n - 1 else None, n - 1, part.copy()),
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
    assert (fast[-3] == (np.arange(3.0) + 3 * group.rank) * group.world_size).all()
    assert fast[-2] is None if group.rank != 1 else (fast[-2] == at_root).all()
    return used


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_verb_takes_it(n: int) -> None:
    verbs = ["all_reduce"] * 2 + ["reduce", "broadcast", "all_gather", "reduce_scatter"]
    verbs += ["all_to_all", "scatter", "gather", "barrier"]
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


def _scatter(group: px.Group, x: Any, out: Any, root: int = 0) -> str:
    """The sum of what this rank gets, or the error."""
    try:
        return str(group.scatter(x if group.rank == root else None, root, out).sum())
    except px.UsageError as error:
        return str(error)


def _scatters(group: px.Group) -> list[str]:
    n, rank = group.world_size, group.rank
    x = np.arange(4.0 * n)
    for root in range(n):  # connects
        _scatter(group, x, np.zeros(4), root)
    found = []
    for out in (np.zeros(5), np.zeros(4, np.int64), np.zeros((2, 2)), np.zeros(8)[::2], None):
        # Rank 1 has other memory than the root means: the part is received nevertheless, and the group goes on.
        found.append(_scatter(group, x, out if rank == 1 else np.zeros(4)))
        found.append(_scatter(group, x, np.zeros(4)))
    for late in range(n):  # longer than the fast path waits, for the root and for another
        if rank == late:
            time.sleep(0.1)
        found.append(_scatter(group, x, np.zeros(4)))
    long = np.full(n << 20, 1.0)  # more than the buffers hold: the root waits for the others
    if rank == 1:
        time.sleep(0.1)
    found.append(_scatter(group, long, np.zeros(1 << 20)))
    mine = x.copy()
    found.append(_scatter(group, mine, mine[4 * rank : 4 * rank + 4] if rank == 0 else np.zeros(4)))  # in place
    return found


@pytest.mark.parametrize("n", [2, 3])
def test_scatters(n: int) -> None:
    for rank, found in enumerate(run_ranks(n, _scatters, backend="mesh", env=TCP)):
        mine = str(16.0 * rank + 6)
        expected = [mine] * 12 + [mine] * (n - 2) + [str(float(1 << 20)), mine]
        if rank == 1:
            expected[0] = "out is float64[5], but rank 0 scattered float64[4]"
            expected[2] = "out is int64[4], but rank 0 scattered float64[4]"
        assert found == expected


def _around_the_slot(group: px.Group) -> list[str]:
    n, rank = group.world_size, group.rank
    found = []
    for items in (SHORT_PART // 8 - 1, SHORT_PART // 8, SHORT_PART // 8 + 1):
        x = np.arange(1.0 * items * n)
        for source in (x, np.repeat(x, 2)[::2]):  # the second one is not plain: the root goes the general way
            for _ in range(2):
                out = np.zeros(items)
                group.scatter(source if rank == 0 else None, 0, out)
                assert (out == np.arange(items) + 1.0 * items * rank).all()
            out = np.zeros(items)[::-1]  # nor this: the others do
            group.scatter(source if rank == 0 else None, 0, out if rank else np.zeros(items))
            assert not rank or (out == np.arange(items) + 1.0 * items * rank).all()
        for other in (items - 1, items + 1):
            untouched = np.zeros(other)
            found.append(_scatter(group, x, untouched if rank == 1 else np.zeros(items)))
            assert not untouched.any()
    return found


@pytest.mark.parametrize("n", [2, 3])
def test_a_short_part_travels_in_the_slot(n: int) -> None:
    said = run_ranks(n, _around_the_slot, backend="mesh", env=TCP)[1]
    most = SHORT_PART // 8
    assert said == [
        f"out is float64[{other}], but rank 0 scattered float64[{items}]"
        for items in (most - 1, most, most + 1)
        for other in (items - 1, items + 1)
    ]


def test_a_short_scatter_is_one_message_for_each_rank() -> None:
    whole = 4 * SHORT_PART
    assert sorted(cut("scatter", "linear", 0, 4, 0, whole, 1).chunks) == [0, 1, 2, 3]
    assert sorted(cut("scatter", "linear", 0, 4, 0, whole + 4, 1).chunks) == [0, 1, 2, 3, 4]


def _other_root(group: px.Group) -> str:
    """Two ranks that take each other for the root of a scatter."""
    out = np.zeros(2)
    for root in range(2):
        group.scatter(np.ones(4) if group.rank == root else None, root, out)
    with pytest.raises(px.Desync) as raised:
        group.scatter(None, 1 - group.rank, out)
    return str(raised.value)


def test_scatters_of_different_roots_part() -> None:
    for said in run_ranks(2, _other_root, backend="mesh", env=TCP):
        assert "scatter(src=0)" in said
        assert "scatter(src=1)" in said


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
    began = time.monotonic()
    with pytest.raises(_Enough):  # noqa: PT012 - the alarm may come at once
        signal.setitimer(signal.ITIMER_REAL, 0.02)  # while the core still waits
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


def _faults_of_a_reduction(group: px.Group) -> float:
    x = np.zeros(1 << 18, np.float32)
    for _ in range(5):
        group.all_reduce(x)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        group.all_reduce(x)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 20


def test_memory_for_what_is_reduced_is_kept_from_call_to_call() -> None:
    faults = run_ranks(4, _faults_of_a_reduction, backend="mesh", env=TCP)
    assert sorted(faults)[1] < 20  # by two peers, 128 pages of scratch; what another thread does may cost a few
