"""The barriers of the classic wire: every message is expected, and nobody leaves before all have come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import pytest

from phalanx.algorithms.classic import BarrierMessage, ring_barrier, star_barrier

from .simulate import SIZES


@pytest.mark.parametrize("barrier", [star_barrier, ring_barrier])
@pytest.mark.parametrize("size", SIZES)
def test_barrier(barrier: Callable[[int, int], Sequence[BarrierMessage]], size: int) -> None:
    left = [deque(barrier(rank, size)) for rank in range(size)]
    heard = [{rank} for rank in range(size)]
    """The ranks whose arrival each rank knows of, directly or not."""
    wire: dict[tuple[int, int], deque[set[int]]] = {}
    moved = True
    while moved:
        moved = False
        for rank, messages in enumerate(left):
            while messages:
                peer, sends = messages[0]
                if sends:
                    wire.setdefault((rank, peer), deque()).append(set(heard[rank]))
                elif wire.get((peer, rank)):
                    heard[rank] |= wire[peer, rank].popleft()
                else:
                    break
                messages.popleft()
                moved = True
    assert not any(left), "somebody waits for ever"
    assert not any(wire.values()), "a message was sent that nobody expects"
    assert all(known == set(range(size)) for known in heard), "somebody left before all had come"


def test_the_ring_starts_at_rank_0() -> None:
    assert [tuple(message) for message in ring_barrier(0, 3)] == [(1, True), (2, False)] * 2
    assert [tuple(message) for message in ring_barrier(2, 3)] == [(1, False), (0, True)] * 2
