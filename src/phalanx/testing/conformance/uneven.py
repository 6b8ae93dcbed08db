"""Gathers and scatters of parts that differ in length."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import UsageError
from ...group import Group
from .check import check
from .common import differ, expect, same

RANKS = 3
COUNTS: tuple[tuple[int, ...], ...] = ((2, 0, 5), (0, 0, 0), (1, 1, 1), (7, 30_000, 1))


def rows(rank: int, count: int) -> npt.NDArray[np.float32]:
    """Some rows that only this rank has."""
    return (np.arange(count * 3, dtype=np.float32) + 100 * rank).reshape(count, 3)


@check(ranks=RANKS)
def gathered(backend: Any) -> None:
    """Unequal parts are put together, with counts that all know and with counts that the call finds out."""
    with Group(backend) as group:
        me = group.rank
        for counts in COUNTS:
            everything = np.concatenate([rows(rank, counts[rank]) for rank in range(RANKS)])
            for given in ("auto", list(counts), np.array(counts)):
                known: Any = given
                assert same(group.all_gather(rows(me, counts[me]), counts=known), everything)
                out = np.empty_like(everything)
                assert group.all_gather(rows(me, counts[me]), out, counts=known) is out
                assert same(out, everything)
                for root in range(RANKS):
                    result = group.gather(rows(me, counts[me]), root, counts=known)
                    assert (result is None) == (me != root)
                    assert result is None or same(result, everything)


@check(ranks=RANKS)
def scattered(backend: Any) -> None:
    """Unequal parts are given out: as the root says, or cut as `numpy.array_split` does."""
    with Group(backend) as group:
        me = group.rank
        for counts in COUNTS:
            everything = np.concatenate([rows(rank, counts[rank]) for rank in range(RANKS)])
            for root in range(RANKS):
                mine = everything if me == root else None
                told: Any = counts if me == root else "auto"
                assert same(group.scatter(mine, root, counts=told), rows(me, counts[me]))
                out = np.empty((counts[me], 3), np.float32)
                assert group.scatter(mine, root, out, counts=counts) is out
                assert same(out, rows(me, counts[me]))
        for length in (0, 2, 10):
            x = np.arange(length, dtype=np.int16)
            part = group.scatter(x if me == 1 else None, 1, counts="auto")
            assert same(part, np.array_split(x, RANKS)[me])
            back = group.gather(part, 2, counts="auto")
            assert back is None if me != 2 else back is not None and same(back, x)


@check(ranks=RANKS)
def uneven_in_place(backend: Any) -> None:
    """An array that is this rank's own part of the other is used in place."""
    counts = (2, 0, 5)
    starts = (0, 2, 2)
    with Group(backend) as group:
        me = group.rank
        everything = np.concatenate([rows(rank, counts[rank]) for rank in range(RANKS)])
        for array in (np.empty, group.empty):
            for given in (counts, "auto"):
                known: Any = given
                out: Any = array(everything.shape, np.float32)
                part = out[starts[me] : starts[me] + counts[me]]
                part[:] = rows(me, counts[me])
                assert group.all_gather(part, out, counts=known) is out
                assert same(out, everything)
            x: Any = array(everything.shape, np.float32)
            x[:] = everything
            part = x[starts[me] : starts[me] + counts[me]]
            group.scatter(x if me == 2 else None, 2, part, counts=counts)
            assert same(part, rows(me, counts[me]))


@check(ranks=RANKS)
def uneven_in_the_background(backend: Any) -> None:
    """Unequal parts, asynchronously."""
    with Group(backend) as group:
        me = group.rank
        everything = np.repeat(np.arange(RANKS), [1, 2, 3])
        works: list[Any] = [
            group.all_gather(np.full(me + 1, me), counts="auto", async_op=True),
            group.gather(np.full(me + 1, me), 0, counts=[1, 2, 3], async_op=True),
            group.scatter(everything if me == 1 else None, 1, counts=[1, 2, 3], async_op=True),
        ]
        assert same(works[0].wait(timeout=30), everything)
        assert works[1].wait(timeout=30) is None or me == 0
        assert works[2].wait(timeout=30).tolist() == [me] * (me + 1)


@check(ranks=RANKS)
def uneven_refused(backend: Any) -> None:
    """Counts and arrays that do not fit are refused: before anything is sent, or once the others have theirs."""
    with Group(backend) as group:
        me = group.rank
        bad: Any
        for bad in ([1, 2], [1, 2, -3], "all", 3, [1.5, 1, 1]):
            expect(UsageError, group.all_gather, np.zeros(2), counts=bad)
        error = expect(UsageError, group.all_gather, np.zeros(2), counts=[3, 3, 3])
        assert f"rank {group.members[me]} has 2 rows" in str(error), error
        expect(UsageError, group.gather, np.zeros(()), 0, counts="auto")
        expect(UsageError, group.scatter, np.zeros(5), me, counts=[1, 1, 1])
        # An out that does not fit is this rank's own mistake: the others get theirs.
        x = np.full(me + 1, me)
        if me == 1:
            expect(UsageError, group.all_gather, x, np.zeros(5, x.dtype), counts="auto")
        else:
            assert group.all_gather(x, counts="auto").size == 6
        wrong: Any = [2, 2, 2] if me == 2 else [1, 2, 3]
        if me == 2:
            error = expect(UsageError, group.scatter, None, 0, counts=wrong)
            assert "[1, 2, 3]" in str(error)
        else:
            group.scatter(np.arange(6) if me == 0 else None, 0, counts=wrong)
        assert group.all_reduce(np.ones(1)).tolist() == [RANKS]


@check(ranks=2, lanes=True)
def uneven_that_differ(backend: Any) -> None:
    """Ranks that differ in counts, dtype or the shape of a row, or of which one has no counts, find out."""
    me = backend.rank
    cases: list[tuple[Any, Any]] = [
        (np.ones(1 + me), ([1, 1], [1, 2])[me]),
        (np.ones(2, (np.float32, np.float64)[me]), "auto"),
        (np.ones((2, 2 + me)), "auto"),
        (np.ones(2), ("auto", None)[me]),
        (np.ones(2), ("auto", [2, 2])[me]),
    ]
    for x, counts in cases:
        differ(backend, functools.partial(_gather, x, counts))
    kinds: Any = ("auto", None)
    differ(backend, lambda group, seconds: group.scatter(np.ones(2), 0, counts=kinds[me], timeout=seconds))


def _gather(x: Any, counts: Any, group: Group, seconds: float) -> None:
    group.all_gather(x, counts=counts, timeout=seconds)
