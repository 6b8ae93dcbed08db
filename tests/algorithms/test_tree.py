from __future__ import annotations

import numpy as np
import pytest

from phalanx.algorithms import tree

from .simulate import check_overlap, counts, every_size, integers, simulate, wild_floats


def log2_up(size: int) -> int:
    return (size - 1).bit_length()


def log2_down(size: int) -> int:
    return size.bit_length() - 1


@every_size
def test_broadcast(size: int) -> None:
    for root in range(size):
        schedules = [tree.broadcast(rank, size, root) for rank in range(size)]
        for schedule in schedules:
            check_overlap(schedule)
        for i, count in enumerate(counts(size)):
            buffers = integers(size, count)
            wanted = buffers[root].copy()
            # Neighbouring counts and roots alternate, so that every root and every count meets both kinds of sends.
            report = simulate(schedules, buffers, buffered=bool((i + root) % 2), seed=root)
            assert (buffers == wanted).all()
            assert report.received == [0 if rank == root else wanted.nbytes for rank in range(size)]
            assert report.sent[root] == log2_up(size) * wanted.nbytes
            for rank, schedule in enumerate(schedules):
                children = report.messages[rank]
                assert report.sent[rank] == children * wanted.nbytes
                assert len(schedule.steps) == children + (rank != root)
            assert report.rounds == log2_up(size)


@every_size
def test_reduce(size: int) -> None:
    for root in range(size):
        schedules = [tree.reduce(rank, size, root) for rank in range(size)]
        for schedule in schedules:
            check_overlap(schedule)
        for i, count in enumerate(counts(size)):
            buffers = integers(size, count)
            wanted = buffers.sum(axis=0)
            report = simulate(schedules, buffers, buffered=bool((i + root) % 2), seed=root)
            assert (buffers[root] == wanted).all()
            assert report.sent == [0 if rank == root else wanted.nbytes for rank in range(size)]
            assert report.received[root] == log2_up(size) * wanted.nbytes
            for rank, schedule in enumerate(schedules):
                children = sum(len(step.recvs) for step in schedule.steps)
                assert report.received[rank] == children * wanted.nbytes
                assert len(schedule.steps) == children + (rank != root)
            assert report.rounds == log2_up(size)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 31, 64])
def test_reduce_gives_the_same_bits_in_every_run(size: int) -> None:
    for root in range(size):
        results = set()
        for seed in range(4):
            buffers = wild_floats(size, 33)
            schedules = [tree.reduce(rank, size, root) for rank in range(size)]
            simulate(schedules, buffers, buffered=bool(seed % 2), seed=seed)
            results.add(buffers[root].tobytes())
        assert len(results) == 1


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 31, 64])
def test_reduce_combines_neighbours_in_the_order_of_ranks(size: int) -> None:
    for root in range(size):
        buffers = np.array([[f"{rank} "] for rank in range(size)], dtype=object)
        simulate([tree.reduce(rank, size, root) for rank in range(size)], buffers)
        assert buffers[root][0].split() == [str((root + i) % size) for i in range(size)]


@every_size
@pytest.mark.parametrize("buffered", [False, True])
def test_barrier(size: int, buffered: bool) -> None:
    schedules = [tree.barrier(rank, size) for rank in range(size)]
    report = simulate(schedules, np.zeros((size, 0)), buffered=buffered, seed=size)
    assert report.heard == [(1 << size) - 1] * size
    assert report.rounds == 2 * log2_down(size)
    for rank, schedule in enumerate(schedules):
        children = len(tree.broadcast(rank, size, 0).steps) - (rank != 0)
        assert len(schedule.steps) == 2 * (children > 0) + (rank != 0)
        assert report.messages[rank] == children + (rank != 0)
        assert sum(len(step.recvs) for step in schedule.steps) == report.messages[rank]


@every_size
def test_at_least_half_of_all_ranks_are_leaves(size: int) -> None:
    leaves = [rank for rank in range(size) if not any(step.recvs for step in tree.reduce(rank, size, 0).steps)]
    assert len(leaves) == (size + 1) // 2
