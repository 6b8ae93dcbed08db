from __future__ import annotations

from collections.abc import Callable

import pytest

from phalanx.algorithms import Schedule, chain
from phalanx.errors import InvalidRank, UsageError

from .simulate import check_overlap, every_size, integers, simulate, wild_floats


@every_size
def test_broadcast(size: int) -> None:
    for root in sorted({0, 1 % size, size - 1}):
        for pieces in (1, 2, 7):
            schedules = [chain.broadcast(rank, size, root, pieces) for rank in range(size)]
            for schedule in schedules:
                check_overlap(schedule)
            for count in (0, 1, 2 * pieces + 1):
                buffers = integers(size, count)
                wanted = buffers[root].copy()
                report = simulate(schedules, buffers, buffered=bool(count % 2), seed=root)
                assert (buffers == wanted).all()
                last = (root - 1) % size
                assert report.received == [0 if rank == root else wanted.nbytes for rank in range(size)]
                assert report.sent == [0 if rank == last else wanted.nbytes for rank in range(size)]
                assert report.rounds == (pieces + size - 2 if size > 1 else 0)


@every_size
def test_reduce(size: int) -> None:
    for root in sorted({0, 1 % size, size - 1}):
        for pieces in (1, 2, 7):
            schedules = [chain.reduce(rank, size, root, pieces) for rank in range(size)]
            for schedule in schedules:
                check_overlap(schedule)
            for count in (0, 1, 2 * pieces + 1):
                buffers = integers(size, count)
                wanted = buffers.sum(axis=0)
                report = simulate(schedules, buffers, buffered=bool(count % 2), seed=root)
                assert (buffers[root] == wanted).all()
                last = (root - 1) % size
                assert report.received == [0 if rank == last else wanted.nbytes for rank in range(size)]
                assert report.sent == [0 if rank == root else wanted.nbytes for rank in range(size)]
                assert report.rounds == (pieces + size - 2 if size > 1 else 0)


def test_reduce_goes_by_the_order_of_ranks() -> None:
    size, root = 5, 3
    data = wild_floats(size, 300)
    buffers = data.copy()
    simulate([chain.reduce(rank, size, root, 4) for rank in range(size)], buffers)
    total = data[(root - 1) % size]
    for place in range(size - 2, -1, -1):
        total = data[(root + place) % size] + total
    assert total.tobytes() == buffers[root].tobytes()
    # The data can tell: another order gives other bits.
    assert data.sum(axis=0).tobytes() != buffers[root].tobytes()


@pytest.mark.parametrize("algorithm", [chain.broadcast, chain.reduce])
def test_it_is_cached_and_checked(algorithm: Callable[[int, int, int, int], Schedule]) -> None:
    assert algorithm(1, 5, 2, 4) is algorithm(1, 5, 2, 4)
    with pytest.raises(InvalidRank):
        algorithm(5, 5, 0, 4)
    with pytest.raises(UsageError, match="cannot be cut into 0 pieces"):
        algorithm(0, 5, 0, 0)
