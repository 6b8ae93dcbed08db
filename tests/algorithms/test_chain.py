from __future__ import annotations

import pytest

from phalanx.algorithms import chain
from phalanx.errors import InvalidRank, UsageError

from .simulate import check_overlap, every_size, integers, simulate


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


def test_it_is_cached_and_checked() -> None:
    assert chain.broadcast(1, 5, 2, 4) is chain.broadcast(1, 5, 2, 4)
    with pytest.raises(InvalidRank):
        chain.broadcast(5, 5, 0, 4)
    with pytest.raises(UsageError, match="cannot be cut into 0 pieces"):
        chain.broadcast(0, 5, 0, 0)
