"""The barriers of the classic wire, as the messages of one rank in their order.

Cost for n ranks: the star takes 2·(n - 1) messages, all of them rank 0's, and needs only connections with rank 0. The
ring takes 2·n messages one after another, two of each rank, and is what the classic mesh speaks.

Unlike a `Schedule`, a list of these runs strictly one message after another, as ferrotorch's ranks do.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from .schedule import check_ranks

__all__ = ["BarrierMessage", "ring_barrier", "star_barrier"]


class BarrierMessage(NamedTuple):
    """One message to a peer, or from it."""

    peer: int
    sends: bool


@lru_cache
def star_barrier(rank: int, size: int) -> tuple[BarrierMessage, ...]:
    """Everybody tells rank 0, then rank 0 tells everybody.

    Raises:
        InvalidWorldSize: `size` is less than 1.
        InvalidRank: `rank` is not in a group of that size.
    """
    check_ranks(size, rank)
    if rank:
        return (BarrierMessage(0, sends=True), BarrierMessage(0, sends=False))
    others = range(1, size)
    return (
        *(BarrierMessage(peer, sends=False) for peer in others),
        *(BarrierMessage(peer, sends=True) for peer in others),
    )


@lru_cache
def ring_barrier(rank: int, size: int) -> tuple[BarrierMessage, ...]:
    """A message goes round twice, from rank 0 to the last and back: no rank leaves before the second one has passed.

    Raises:
        InvalidWorldSize: `size` is less than 1.
        InvalidRank: `rank` is not in a group of that size.
    """
    check_ranks(size, rank)
    if size == 1:
        return ()
    onward, arrival = BarrierMessage((rank + 1) % size, sends=True), BarrierMessage((rank - 1) % size, sends=False)
    return (onward, arrival) * 2 if rank == 0 else (arrival, onward) * 2
