from __future__ import annotations

import numpy as np
import pytest

from phalanx.algorithms import Schedule, star

from .simulate import check_overlap, counts, every_size, integers, simulate, wild_floats


def check_star(schedules: list[Schedule]) -> None:
    """Nobody but rank 0 talks to anybody but rank 0, and nobody to itself."""
    for rank, schedule in enumerate(schedules):
        allowed = set(range(1, len(schedules))) if rank == 0 else {0}
        for step in schedule.steps:
            assert {send.peer for send in step.sends} | {recv.peer for recv in step.recvs} <= allowed


@every_size
def test_broadcast(size: int) -> None:
    for root in range(size):
        schedules = [star.broadcast(rank, size, root) for rank in range(size)]
        check_star(schedules)
        for schedule in schedules:
            check_overlap(schedule)
        assert all(len(schedule.steps) == 1 for schedule in schedules[1:])
        for i, count in enumerate(counts(size)):
            buffers = integers(size, count)
            wanted = buffers[root].copy()
            report = simulate(schedules, buffers, buffered=bool((i + root) % 2), seed=root)
            assert (buffers == wanted).all()
            if root == 0:
                rounds, fan_out, fan_in = min(size - 1, 1), size - 1, 0
            else:
                rounds, fan_out, fan_in = min(size - 1, 2), size - 2, 1
            assert report.rounds == len(schedules[0].steps) == rounds
            assert report.sent[0] == fan_out * wanted.nbytes
            assert report.received[0] == fan_in * wanted.nbytes
            for rank in range(1, size):
                moved = (wanted.nbytes, 0) if rank == root else (0, wanted.nbytes)
                assert (report.sent[rank], report.received[rank]) == moved


@every_size
def test_all_reduce(size: int) -> None:
    schedules = [star.all_reduce(rank, size) for rank in range(size)]
    check_star(schedules)
    for schedule in schedules:
        check_overlap(schedule)
    steps = 0 if size == 1 else size
    assert [len(schedule.steps) for schedule in schedules] == [steps, *[2] * (size - 1)]
    for count in counts(size):
        for buffered in (False, True):
            buffers = integers(size, count)
            wanted = buffers.sum(axis=0)
            report = simulate(schedules, buffers, buffered=buffered, seed=size)
            assert (buffers == wanted).all()
            assert report.sent == report.received == [(size - 1) * wanted.nbytes, *[wanted.nbytes] * (size - 1)]
            assert report.rounds == steps


@every_size
def test_all_ranks_have_the_same_bits_in_every_run(size: int) -> None:
    schedules = [star.all_reduce(rank, size) for rank in range(size)]
    results = set()
    for seed in range(4):
        buffers = wild_floats(size, 33)
        simulate(schedules, buffers, buffered=bool(seed % 2), seed=seed)
        results |= {buffer.tobytes() for buffer in buffers}
    assert len(results) == 1


def test_all_reduce_is_the_sum_in_the_order_of_ranks() -> None:
    data = wild_floats(9, 50)
    buffers = data.copy()
    simulate([star.all_reduce(rank, 9) for rank in range(9)], buffers)
    total = data[0].copy()
    for row in data[1:]:
        total += row
    assert total.tobytes() == buffers[5].tobytes()
    backwards = data[::-1].sum(axis=0)
    assert backwards.tobytes() != buffers[5].tobytes(), "the data cannot tell one order from another"


@every_size
@pytest.mark.parametrize("buffered", [False, True])
def test_barrier(size: int, buffered: bool) -> None:
    schedules = [star.barrier(rank, size) for rank in range(size)]
    check_star(schedules)
    report = simulate(schedules, np.zeros((size, 0)), buffered=buffered, seed=size)
    assert report.heard == [(1 << size) - 1] * size
    assert report.rounds == (2 if size > 1 else 0)
    assert report.messages == [size - 1, *[1] * (size - 1)]
    assert [len(schedule.steps) for schedule in schedules] == [2 if size > 1 else 0, *[1] * (size - 1)]
