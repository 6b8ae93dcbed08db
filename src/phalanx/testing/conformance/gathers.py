"""The collectives that move parts of arrays and objects from everyone to everyone."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import InvalidRank, UsageError
from ...group import Group
from .check import check
from .common import expect, same

RANKS = 3


def rows(rank: int, count: int = 2 * RANKS) -> npt.NDArray[np.int64]:
    """Some rows that only this rank has."""
    return np.arange(count * 4, dtype=np.int64).reshape(count, 4) + 1000 * rank


@check(ranks=RANKS)
def parts_of_arrays(backend: Any) -> None:
    """Gathering, scattering and exchanging give what NumPy gives."""
    with Group(backend) as group:
        me = group.rank
        everything = np.concatenate([rows(rank) for rank in range(RANKS)])
        assert same(group.all_gather(rows(me)), everything)
        out = np.zeros_like(everything)
        assert group.all_gather(rows(me), out) is out
        assert same(out, everything)
        for root in range(RANKS):
            gathered = group.gather(rows(me), root)
            assert gathered is None if me != root else gathered is not None and same(gathered, everything)
            part = group.scatter(everything if me == root else None, root)
            assert same(part, rows(me))
        exchanged = group.all_to_all(rows(me))
        assert same(exchanged, np.concatenate([rows(rank)[2 * me : 2 * me + 2] for rank in range(RANKS)]))
        # Rank r sends s + r rows to rank s.
        sizes = [s + me for s in range(RANKS)]
        mine = rows(me, sum(sizes))
        got = group.all_to_all(mine, send_counts=sizes, recv_counts=[me + r for r in range(RANKS)])
        wanted = []
        for rank in range(RANKS):
            start = sum(s + rank for s in range(me))
            wanted.append(rows(rank, sum(s + rank for s in range(RANKS)))[start : start + me + rank])
        assert same(got, np.concatenate(wanted))


@check(ranks=RANKS)
def parts_of_reductions(backend: Any) -> None:
    """Reductions to one rank, in parts, and of many arrays at once give what NumPy gives."""
    with Group(backend) as group:
        me = group.rank
        total = np.sum([rows(rank) for rank in range(RANKS)], axis=0)
        for root in range(RANKS):
            x = rows(me)
            group.reduce(x, root)
            assert same(x, total if me == root else rows(me)), "only the root's array is changed"
        assert same(group.reduce_scatter(rows(me)), total[2 * me : 2 * me + 2])
        many = [np.full(5, float(me)), np.full((2, 3), me, np.float32), np.full(4, 2.0 * me)]
        found = group.all_reduce_many(many)
        assert [one.reshape(-1)[0] for one in found] == [3, 3, 6]
        assert all(one is given for one, given in zip(found, many, strict=True))


@check(ranks=RANKS)
def objects_of_everyone(backend: Any) -> None:
    """Objects are broadcast, gathered and scattered."""
    with Group(backend) as group:
        me = group.rank
        mine = {"rank": me, "data": [np.arange(me + 1), "x" * 1000 * me]}

        def is_of(value: Any, rank: int) -> bool:
            data = value["data"]
            return bool(
                value["rank"] == rank and data[0].tolist() == list(range(rank + 1)) and len(data[1]) == 1000 * rank
            )

        for root in range(RANKS):
            assert is_of(group.broadcast_object(mine if me == root else None, root), root)
            gathered = group.gather_object(mine, root)
            assert (gathered is None) == (me != root)
            assert all(is_of(one, rank) for rank, one in enumerate(gathered or []))
            assert group.scatter_object([10, 11, 12] if me == root else None, root) == 10 + me
        assert all(is_of(one, rank) for rank, one in enumerate(group.all_gather_object(mine)))


@check(ranks=RANKS)
def refused(backend: Any) -> None:
    """Impossible arguments are refused before anything is sent."""
    with Group(backend) as group:
        bad = np.zeros((RANKS + 1, 2))  # cannot be cut into one part per rank
        for call in (
            lambda: group.reduce_scatter(bad),
            lambda: group.all_to_all(bad),
            lambda: group.scatter_object([1], group.rank),
            lambda: group.all_gather(np.zeros(2), np.zeros(5)),
            lambda: group.all_to_all(np.zeros(4), send_counts=[1, 2], recv_counts=[1, 1, 1]),
        ):
            expect(UsageError, call)
        for rank in (-1, RANKS):
            for verb in (group.gather, group.reduce, group.scatter, group.broadcast_object, group.gather_object):
                assert expect(InvalidRank, verb, np.zeros(RANKS), rank).value == rank
        assert group.all_reduce(np.ones(1)).tolist() == [RANKS]


@check(ranks=RANKS)
def in_place(backend: Any) -> None:
    """In-place use as in MPI and torch gives the same as separate arrays, short and long."""
    with Group(backend) as group:
        for count in (2, 20_000):
            for array in (np.empty, group.empty):
                _in_place(group, count, array)


def _in_place(group: Group, count: int, array: Any) -> None:
    me = group.rank
    mine = np.arange(RANKS * count, dtype=np.int64).reshape(RANKS * count, 1) + 1000 * me
    total = np.sum([mine + 1000 * (rank - me) for rank in range(RANKS)], axis=0)

    def new() -> Any:
        x = array((RANKS * count, 1), np.int64)
        x[:] = mine
        return x

    def part(x: Any, rank: int) -> Any:
        return x[rank * count : (rank + 1) * count]

    everyone = np.concatenate([part(mine, rank) + 1000 * (rank - me) for rank in range(RANKS)])
    x = new()
    assert group.all_gather(part(x, me), x) is x
    assert same(x, everyone), "all_gather of this rank's part of out"
    for root in (0, RANKS - 1):
        x = new()
        gathered = group.gather(part(x, me), root, x if me == root else None)
        assert gathered is None if me != root else same(x, everyone), "gather of the root's part of out"
        x = new()
        out = part(x, me)
        group.scatter(x if me == root else None, root, out)
        assert same(out, part(mine, me) + 1000 * (root - me)), "scatter to the root's part of x"
    for where in (me, 0):  # as NCCL does it, and as MPI does
        x = new()
        out = part(x, where)
        group.reduce_scatter(x, "sum", out)
        assert same(out, part(total, me)), f"reduce_scatter to part {where} of x"
    exchanged = np.concatenate([part(mine, me) + 1000 * (rank - me) for rank in range(RANKS)])
    x = new()
    assert group.all_to_all(x, x) is x
    assert same(x, exchanged), "all_to_all with x as out"
    x = new()
    group.all_to_all(x, x, send_counts=[count] * RANKS)
    assert same(x, exchanged), "all_to_all by counts with x as out"
    x = new()
    if _is_connected(group):
        group.sendrecv(x, (me + 1) % RANKS, x, (me - 1) % RANKS)
        assert same(x, mine + 1000 * ((me - 1) % RANKS - me)), "sendrecv with x as out"


def _is_connected(group: Group) -> bool:
    return group.backend.topology == "full"


@check(ranks=RANKS)
def overlapping(backend: Any) -> None:
    """Arrays that overlap in any other way are refused before anything is sent, whatever objects share the memory."""
    with Group(backend) as group:
        me = group.rank
        peer, source = ((me + 1) % RANKS, (me - 1) % RANKS) if _is_connected(group) else (0, 0)
        for count in (4, 20_000):
            memory = bytearray(8 * (RANKS + 1) * count)
            base = np.frombuffer(memory, np.int64)
            whole, shifted, other = base[: RANKS * count], base[1 : RANKS * count + 1], (me + 1) % RANKS
            mine = memoryview(memory)[8 : 8 * (count + 1)].cast("q")  # the same memory as another object
            calls: list[Any] = [
                lambda whole=whole, other=other, count=count: group.all_gather(
                    whole[other * count : (other + 1) * count], whole
                ),
                lambda whole=whole, mine=mine: group.all_gather(mine, whole),
                lambda whole=whole, mine=mine: group.gather(mine, group.rank, whole),
                lambda whole=whole, mine=mine: group.scatter(whole, group.rank, mine),
                lambda whole=whole, mine=mine: group.reduce_scatter(whole, "sum", mine),
                lambda whole=whole, shifted=shifted: group.all_to_all(whole, shifted),
                lambda whole=whole, shifted=shifted, count=count: group.all_to_all(
                    whole, shifted, send_counts=[count] * RANKS
                ),
            ]
            if _is_connected(group):
                calls.append(lambda whole=whole, shifted=shifted: group.sendrecv(whole, peer, shifted, source))
            for call in calls:
                error = expect(UsageError, call)
                assert "overlap" in str(error), error
            assert group.all_reduce(np.ones(1)).tolist() == [RANKS]
