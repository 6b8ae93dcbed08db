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
from phalanx.group.engines.slots import ROOM_FOR_PARTS, SLOT
from phalanx.group.engines.steps.layout import OUT, SCRATCH, X, cut
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


def _parts_of_every_length(group: px.Group) -> list[str]:
    """Parts in the slot, along the tree and straight from the root, by every root."""
    n, rank = group.world_size, group.rank
    found = []
    inside, along = ROOM_FOR_PARTS // n // 8, select.SHORT_SCATTER // n // 8
    for root in range(n):
        for items in (inside, inside + 1, along, along + 1):
            x = np.arange(1.0 * items * n)
            mine = np.arange(items) + 1.0 * items * rank
            for source in (x, np.repeat(x, 2)[::2]):  # the second one is not plain: the root goes the general way
                for _ in range(2):
                    out = np.zeros(items)
                    group.scatter(source if rank == root else None, root, out)
                    assert (out == mine).all()
                for general in range(n):  # nor this: one of the others does
                    out = np.zeros(items)[::-1] if rank == general != root else np.zeros(items)
                    group.scatter(source if rank == root else None, root, out)
                    assert (out == mine).all()
            for other in (items - 1, items + 1):  # and one has memory for another part: all but that one have theirs
                for wrong in range(n):
                    if wrong == root:
                        continue
                    untouched = np.zeros(other)
                    out = np.zeros(items)
                    said = _scatter(group, x, untouched if rank == wrong else out, root)
                    assert not untouched.any()
                    if rank == wrong:
                        assert said == f"out is float64[{other}], but rank {root} scattered float64[{items}]"
                        found.append(said)
                    else:
                        assert (out == mine).all()
    return found


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_parts_of_every_length(n: int) -> None:
    for said in run_ranks(n, _parts_of_every_length, backend="mesh", env=TCP):
        assert len(said) == (n - 1) * 4 * 2


def _many_dims(group: px.Group) -> list[Any]:
    """A description that does not go into the slot."""
    n, rank = group.world_size, group.rank
    shape = (1,) * 13 + (3,) + (1,) * 17
    x = np.arange(3.0 * n).reshape(n, *shape)
    found = []
    for root in range(n):
        for out in (None, np.zeros(shape), np.zeros(3)):
            part = group.scatter(x if rank == root else None, root, out)
            assert part.shape == ((1, *shape) if out is None else out.shape)
            found.append(part.reshape(-1).tolist())
    return found


@pytest.mark.parametrize("env", [TCP, TCP | {"PHALANX_PURE": "1"}], ids=["core", "pure"])
def test_a_part_of_many_dims(env: dict[str, str]) -> None:
    for rank, found in enumerate(run_ranks(4, _many_dims, backend="mesh", env=env)):
        assert found == [[3.0 * rank, 3.0 * rank + 1, 3.0 * rank + 2]] * 12


def test_short_parts_are_one_message_for_each_rank() -> None:
    in_slot = cut("scatter", "tree", 0, 4, 0, ROOM_FOR_PARTS, 1)
    assert in_slot.chunks[4] == (SLOT, SCRATCH, 0, (-1, 0))
    passed = cut("scatter", "tree", 2, 4, 0, 4096, 1).chunks
    assert passed == {2: (1024, OUT, 0, (-1, 0)), 3: (1024, SCRATCH, 0, (-1, 0)), 4: (SLOT, X, 0, (-1, 0))}


def _asked_for(group: px.Group) -> float:
    out = np.zeros(2)
    for _ in range(3):
        group.scatter(np.arange(2.0 * group.world_size) if group.rank == 1 else None, 1, out)
    group.scatter(np.arange(9000.0 * group.world_size) if group.rank == 1 else None, 1, np.zeros(9000))
    return float(out[0])


@pytest.mark.parametrize("algorithm", ["scatter=tree", "scatter=linear"])
def test_the_algorithm_of_a_scatter_can_be_chosen(algorithm: str) -> None:
    env = TCP | {"PHALANX_ALGORITHM": algorithm}
    assert run_ranks(4, _asked_for, backend="mesh", env=env) == [0.0, 2.0, 4.0, 6.0]


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
