from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise

import pytest

from phalanx.algorithms import (
    Recv,
    Schedule,
    Send,
    Step,
    bruck,
    chunk_bounds,
    halving_doubling,
    linear,
    ring,
    star,
    tree,
)
from phalanx.errors import InvalidRank, InvalidWorldSize, UsageError

ROOTED = [tree.broadcast, tree.reduce, star.broadcast]
ROOTLESS = [
    *(tree.barrier, bruck.barrier, star.barrier),
    *(ring.all_reduce, star.all_reduce, halving_doubling.all_reduce, halving_doubling.short_all_reduce),
    *(halving_doubling.reduce_scatter, halving_doubling.all_gather, bruck.all_gather, bruck.all_to_all),
    *(linear.all_gather, linear.all_to_all),
]


@pytest.mark.parametrize("parts", range(1, 65))
def test_chunks_are_balanced_and_cover_everything(parts: int) -> None:
    for count in [*range(3 * parts + 2), 10**15 + 7]:
        bounds = chunk_bounds(count, parts)
        assert len(bounds) == parts
        assert bounds[0][0] == 0
        assert bounds[-1][1] == count
        assert all(before[1] == after[0] for before, after in pairwise(bounds))
        assert {stop - start for start, stop in bounds} <= {count // parts, -(-count // parts)}


@pytest.mark.parametrize(("count", "parts"), [(-1, 1), (4, 0), (4, -2)])
def test_chunks_that_make_no_sense_are_refused(count: int, parts: int) -> None:
    with pytest.raises(UsageError, match=f"cannot cut {count} elements into {parts} chunks"):
        chunk_bounds(count, parts)


def test_schedules_are_values() -> None:
    one = Schedule.of([Step(), Step((Send(1, 0),), (Recv(2, 1, reduce=True),))], parts=2)
    assert one == Schedule(2, (Step(sends=(Send(1, 0),), recvs=(Recv(2, 1, True),)),))
    assert len({one, Schedule(2, one.steps)}) == 1
    for value in (one, one.steps[0], one.steps[0].sends[0], one.steps[0].recvs[0]):
        assert not hasattr(value, "__dict__")
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, dataclasses.fields(value)[0].name, 7)


@pytest.mark.parametrize("make", ROOTED)
def test_rooted_schedules_are_cached_and_checked(make: Callable[[int, int, int], Schedule]) -> None:
    assert make(1, 5, 2) is make(1, 5, 2)
    with pytest.raises(InvalidRank, match=r"rank 5 is not in a world of 5 \(valid ranks: 0 to 4\)"):
        make(5, 5, 0)
    with pytest.raises(InvalidRank, match="rank -1 "):
        make(0, 5, -1)
    with pytest.raises(InvalidWorldSize):
        make(0, 0, 0)


@pytest.mark.parametrize("make", ROOTLESS)
def test_rootless_schedules_are_cached_and_checked(make: Callable[[int, int], Schedule]) -> None:
    assert make(1, 5) is make(1, 5)
    with pytest.raises(InvalidRank, match="rank 5 "):
        make(5, 5)
    with pytest.raises(InvalidRank, match="rank -1 "):
        make(-1, 5)
    with pytest.raises(InvalidWorldSize):
        make(0, 0)


def test_alone_there_is_nothing_to_do() -> None:
    assert [make(0, 1, 0).steps for make in ROOTED] == [()] * len(ROOTED)
    assert [make(0, 1).steps for make in ROOTLESS] == [()] * len(ROOTLESS)


def test_a_schedule_among_some_ranks_of_a_larger_group() -> None:
    schedule = Schedule(2, (Step((Send(0, 1),), (Recv(2, 0, reduce=True, before=True, late=True),)),))
    members = [7, 3, 5]
    renamed = schedule.among(members)
    assert renamed == Schedule(2, (Step((Send(7, 1),), (Recv(5, 0, reduce=True, before=True, late=True),)),))
    assert schedule.among(tuple(members)) is renamed
    assert ring.all_reduce(1, 3).among(range(3)) == ring.all_reduce(1, 3)
