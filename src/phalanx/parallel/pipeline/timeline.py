"""A timeline: when each action of a pipeline runs, computed from their durations or measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .actions import Action, Orders

__all__ = ["Span", "Timeline", "simulate"]


class Span(NamedTuple):
    """An action, and when it began and ended."""

    action: Action
    begin: float
    end: float


class Timeline:
    """The spans of all ranks, in any unit of time.

    Args:
        ranks: The spans of each rank, in order.
        length: How long the whole step took; by default until the last span ends.
    """

    def __init__(self, ranks: Sequence[Sequence[Span]], length: float | None = None) -> None:
        self.ranks = [list(spans) for spans in ranks]
        ends = [span.end for spans in self.ranks for span in spans]
        self.length = max(ends, default=0.0) if length is None else length

    def busy(self, rank: int) -> float:
        """The time that a rank computes."""
        return sum(span.end - span.begin for span in self.ranks[rank])

    @property
    def bubble(self) -> float:
        """The time that ranks do not compute, divided by the time that they do."""
        busy = sum(self.busy(rank) for rank in range(len(self.ranks)))
        return (self.length * len(self.ranks) - busy) / busy if busy else 0.0


def simulate(orders: Orders, stages: int, duration: Callable[[Action], float]) -> Timeline:
    """The timeline of ranks that take their actions in order, and each as soon as it has what it needs.

    Sending takes no time. A rank that waits does nothing else, as with receives that block.

    Raises:
        ValueError: The ranks wait for each other without end; says for what.
    """
    ended: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in orders]
    left = sum(map(len, orders))
    while left:
        before = left
        for rank, order in enumerate(orders):
            while len(spans[rank]) < len(order):
                action = order[len(spans[rank])]
                needed = action.needs(stages)
                if needed is not None and needed not in ended:
                    break
                begin = max(spans[rank][-1].end if spans[rank] else 0.0, ended[needed] if needed else 0.0)
                ended[action] = begin + duration(action)
                spans[rank].append(Span(action, begin, ended[action]))
                left -= 1
        if left == before:
            waits = [
                f"rank {rank} waits for {order[len(done)].needs(stages)}"
                for rank, (order, done) in enumerate(zip(orders, spans, strict=True))
                if len(done) < len(order)
            ]
            raise ValueError(f"these orders never end: {', '.join(waits)}")
    return Timeline(spans)
