"""How long a step of a pipeline took, and where its ranks waited."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Literal

from ...arguments import shown
from ...errors import UsageError
from . import drawing
from .actions import Action
from .schedules import PipelineSchedule
from .timeline import Span, Timeline, simulate

__all__ = ["PipelineReport"]

COLUMNS = 40
"""The width of the picture of a step in labels."""


class PipelineReport:
    """The last step of a pipeline, measured on all ranks.

    `timeline` has every action, in seconds. `bubble` is the time that ranks did not compute, divided by the time that
    they did; `expected` is what it would be with these times of the stages if messages took none, and `theory` what it
    would be with equal stages.
    """

    def __init__(self, schedule: PipelineSchedule, timeline: Timeline) -> None:
        self.schedule = schedule
        self.timeline = timeline

    @classmethod
    def of(cls, schedule: PipelineSchedule, everyone: Sequence[Sequence[Sequence[Any]]]) -> PipelineReport:
        """The report, from all ranks' spans, in seconds before the end of the step, which all ranks see at once."""
        ranks = [[Span(Action(*action), begin, end) for action, begin, end in spans] for spans in everyone]
        first = min(span.begin for spans in ranks for span in spans)
        moved = [[Span(span.action, span.begin - first, span.end - first) for span in spans] for spans in ranks]
        return cls(schedule, Timeline(moved))

    @property
    def seconds(self) -> float:
        """From the first forward to the last backward."""
        return self.timeline.length

    @property
    def bubble(self) -> float:
        """Measured."""
        return self.timeline.bubble

    @property
    def theory(self) -> float:
        """With equal stages."""
        return self.schedule.bubble()

    @property
    def expected(self) -> float:
        """With the median time of each stage's forwards and backwards."""
        times: dict[tuple[str, int], list[float]] = {}
        for span in (span for spans in self.timeline.ranks for span in spans):
            times.setdefault((span.action.kind, span.action.stage), []).append(span.end - span.begin)
        medians = {key: statistics.median(found) for key, found in times.items()}
        schedule = self.schedule
        return simulate(schedule.orders, schedule.stages, lambda each: medians[each.kind, each.stage]).bubble

    def draw(self, form: Literal["text", "svg"] = "text") -> str:
        """A picture of the step as it was."""
        if form == "text":
            return drawing.as_text(self.timeline, self.seconds / COLUMNS)
        if form != "svg":
            raise UsageError(f"form={shown(form)} is not valid (expected 'text' or 'svg')")
        return drawing.as_svg(self.timeline, self.seconds / COLUMNS, str(self).splitlines()[0])

    def __str__(self) -> str:
        first = (
            f"{self.schedule.name}: {1000 * self.seconds:.1f} ms, bubble {self.bubble:.1%} of the computing "
            f"(expected of these stages {self.expected:.1%}, of equal ones {self.theory:.1%})"
        )
        lines = [first]
        for rank in range(len(self.timeline.ranks)):
            busy = self.timeline.busy(rank)
            lines.append(f"rank {rank}: computed {1000 * busy:.1f} ms, waited {1000 * (self.seconds - busy):.1f} ms")
        return "\n".join(lines)
