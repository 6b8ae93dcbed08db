"""Schedules of a pipeline: in which order each rank takes its forwards and backwards. Pure: nothing is sent here.

p ranks, v stages per rank, m micro-batches. Stage s is on rank s mod p. Where all actions of a kind take the same time,
the bubble, idle time divided by busy time, and the micro-batches whose activations a rank holds at once are:

| schedule    | bubble          | held by rank r       |
| gpipe       | (p - 1) / m     | m                    |
| 1f1b        | (p - 1) / m     | min(m, p - r)        |
| interleaved | (p - 1) / (v m) | (v + 1) p - 2 r - 1  |

The last line is for a multiple of p. Other numbers of at least p have the same bubble and hold some more, because
rounds are then longer than p; fewer than p cannot fill the pipeline, and wait more. All schedules take the backwards of
a stage in the order of the micro-batches, so that gradients are added up in that order.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from ...arguments import as_index, shown
from ...errors import UsageError
from ...frames import hides_frames
from . import drawing
from .actions import Action, Kind, Orders
from .timeline import Timeline, simulate

__all__ = ["NAMES", "PipelineSchedule"]

NAMES = ("gpipe", "1f1b", "interleaved")


class PipelineSchedule:
    """The order of forwards and backwards on each rank of a pipeline.

    ```python
    print(px.parallel.PipelineSchedule("1f1b", ranks=4, microbatches=8).draw())
    ```

    Args:
        name: `"gpipe"` runs all forwards, then all backwards. `"1f1b"` begins with backwards as soon as it can, and
            holds the activations of few micro-batches. `"interleaved"` is that with several stages per rank, and waits
            less in exchange for more messages.
        ranks: How many there are.
        microbatches: The parts of a batch.
        stages_per_rank: Of `"interleaved"`.

    Raises:
        UsageError: The arguments are not valid.
    """

    @hides_frames
    def __init__(self, name: str, *, ranks: int, microbatches: int, stages_per_rank: int = 1) -> None:
        if name not in NAMES:
            raise UsageError(f"schedule={shown(name)} is not valid (expected one of {', '.join(map(repr, NAMES))})")
        self.name = name
        self.ranks = _above_zero(ranks, "ranks")
        self.microbatches = _above_zero(microbatches, "microbatches")
        self.stages_per_rank = _above_zero(stages_per_rank, "stages_per_rank")
        if name != "interleaved" and self.stages_per_rank != 1:
            raise UsageError(
                f"schedule={name!r} has one stage per rank, not {stages_per_rank} (expected schedule='interleaved')"
            )
        self.orders: Orders = [self._order(rank) for rank in range(self.ranks)]

    def __repr__(self) -> str:
        per_rank = f", {self.stages_per_rank} stages per rank" if self.stages_per_rank > 1 else ""
        return f"<PipelineSchedule {self.name}: {self.ranks} ranks{per_rank}, {self.microbatches} micro-batches>"

    @property
    def stages(self) -> int:
        """The number of stages on all ranks."""
        return self.ranks * self.stages_per_rank

    def rank_of(self, stage: int) -> int:
        """The rank that has a stage."""
        return stage % self.ranks

    def live_activations(self, rank: int) -> int:
        """The most micro-batches whose forward a rank has done and whose backward it has not, over all its stages."""
        most = now = 0
        for action in self.orders[rank]:
            now += 1 if action.kind == "F" else -1
            most = max(most, now)
        return most

    def timeline(self, *, forward: float = 1.0, backward: float = 2.0) -> Timeline:
        """When each action runs, if all forwards of a rank's stages together take `forward`, backwards `backward`."""
        durations: dict[Kind, float] = {"F": forward / self.stages_per_rank, "B": backward / self.stages_per_rank}
        return simulate(self.orders, self.stages, lambda action: durations[action.kind])

    def bubble(self, *, forward: float = 1.0, backward: float = 2.0) -> float:
        """The time that ranks wait, divided by the time that they compute. Sending takes no time here."""
        return self.timeline(forward=forward, backward=backward).bubble

    @hides_frames
    def draw(self, form: Literal["text", "svg"] = "text", *, forward: float = 1.0, backward: float = 2.0) -> str:
        """A picture of the schedule: a line per rank, time from left to right.

        Args:
            form: `"text"` or `"svg"`.
            forward: How long a forward takes.
            backward: How long a backward takes.
        """
        timeline = self.timeline(forward=forward, backward=backward)
        unit = min(forward, backward) / self.stages_per_rank
        if form == "text":
            return drawing.as_text(timeline, unit)
        if form != "svg":
            raise UsageError(f"form={shown(form)} is not valid (expected 'text' or 'svg')")
        per_rank = f" of {self.stages_per_rank} stages" if self.stages_per_rank > 1 else ""
        title = (
            f"{self.name}: {self.ranks} ranks{per_rank}, {self.microbatches} micro-batches, "
            f"bubble {timeline.bubble:.0%} of the computing"
        )
        return drawing.as_svg(timeline, unit, title)

    def _repr_svg_(self) -> str:
        """The picture, for notebooks."""
        return self.draw("svg")

    # -- the orders ----------------------------------------------------------------------------------------------------

    def _order(self, rank: int) -> list[Action]:
        forwards = self._in_rounds("F", rank)
        backwards = self._in_rounds("B", rank)
        return merged(forwards, backwards, self._ahead(rank))

    def _in_rounds(self, kind: Kind, rank: int) -> list[Action]:
        """A rank's forwards or backwards: a round through one of its stages, the same through the next, and so on."""
        local = range(self.stages_per_rank)
        return [
            Action(kind, index * self.ranks + rank, microbatch)
            for microbatches in self._rounds()
            for index in (local if kind == "F" else reversed(local))
            for microbatch in microbatches
        ]

    def _rounds(self) -> list[range]:
        """The micro-batches in rounds of p or a little more.

        A last round of less than p would deadlock: ranks would wait for forwards that others do only after backwards.
        """
        count = max(1, self.microbatches // self.ranks)
        return [range(part[0], part[-1] + 1) for part in np.array_split(np.arange(self.microbatches), count)]

    def _ahead(self, rank: int) -> int:
        """How many forwards a rank does before the first that is followed by a backward."""
        if self.name == "gpipe":
            return self.microbatches
        to_the_end = self.ranks - 1 - rank
        if self.name == "1f1b":
            return to_the_end
        # One forward goes down the ranks while a backward comes up, hence twice the way; and the first backward is that
        # of the rank's last stage, after one round through the others.
        return 2 * to_the_end + (self.stages_per_rank - 1) * len(self._rounds()[0])


def merged(forwards: list[Action], backwards: list[Action], ahead: int) -> list[Action]:
    """The first `ahead` forwards, then one forward and one backward in turn, then the backwards that are left."""
    ahead = min(ahead, len(forwards))
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - ahead :]


def _above_zero(value: int, name: str) -> int:
    number = as_index(value, name, "a whole number above 0")
    if number < 1:
        raise UsageError(f"{name}={value!r} is not valid (expected a whole number above 0)")
    return number
