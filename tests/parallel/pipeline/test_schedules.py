"""Schedules by themselves: complete, free of deadlock, as short and as frugal as they can be."""

from __future__ import annotations

import functools
from itertools import product

import pytest

import phalanx as px
from phalanx.parallel.pipeline.actions import Action
from phalanx.parallel.pipeline.schedules import NAMES
from phalanx.parallel.pipeline.timeline import simulate

SIZES = [
    (name, ranks, microbatches, per_rank)
    for name, ranks, microbatches in product(NAMES, (1, 2, 3, 4, 5, 8), (*range(1, 13), 16, 17, 23))
    for per_rank in ((1, 2, 3) if name == "interleaved" else (1,))
]


@functools.cache
def schedules() -> list[px.parallel.PipelineSchedule]:
    return [
        px.parallel.PipelineSchedule(name, ranks=ranks, microbatches=microbatches, stages_per_rank=per_rank)
        for name, ranks, microbatches, per_rank in SIZES
    ]


def test_every_action_once_and_on_its_rank() -> None:
    for schedule in schedules():
        for rank, order in enumerate(schedule.orders):
            stages = range(rank, schedule.stages, schedule.ranks)
            wanted = {Action(kind, *each) for kind in "FB" for each in product(stages, range(schedule.microbatches))}
            assert len(order) == len(wanted), schedule
            assert set(order) == wanted, schedule


def test_no_deadlock_with_receives_that_block() -> None:
    for schedule in schedules():
        timeline = schedule.timeline()
        ended = {span.action: span.end for spans in timeline.ranks for span in spans}
        for spans in timeline.ranks:
            for span in spans:
                needed = span.action.needs(schedule.stages)
                assert needed is None or ended[needed] <= span.begin, (schedule, span)


def test_gradients_are_added_in_the_order_of_microbatches() -> None:
    for schedule in schedules():
        for order in schedule.orders:
            for kind, stage in {(action.kind, action.stage) for action in order}:
                found = [each.microbatch for each in order if (each.kind, each.stage) == (kind, stage)]
                assert found == list(range(schedule.microbatches)), schedule


@pytest.mark.parametrize("backward", [1.0, 2.0, 3.0])
def test_bubbles_are_those_of_the_theory(backward: float) -> None:
    for schedule in schedules():
        theory = (schedule.ranks - 1) / (schedule.stages_per_rank * schedule.microbatches)
        found = schedule.bubble(backward=backward)
        if schedule.name != "interleaved" or schedule.microbatches >= schedule.ranks:
            assert found == pytest.approx(theory), schedule
        else:
            assert found >= theory, schedule


def test_1f1b_holds_no_more_than_the_stages_below() -> None:
    for schedule in schedules():
        held = [schedule.live_activations(rank) for rank in range(schedule.ranks)]
        if schedule.name == "1f1b":
            assert held == [min(schedule.microbatches, schedule.ranks - rank) for rank in range(schedule.ranks)]
        elif schedule.name == "gpipe":
            assert held == [schedule.microbatches] * schedule.ranks
        elif schedule.microbatches % schedule.ranks == 0 and schedule.microbatches > schedule.ranks:
            top = (schedule.stages_per_rank + 1) * schedule.ranks - 1
            assert held == [top - 2 * rank for rank in range(schedule.ranks)], schedule


def test_a_deadlock_is_found() -> None:
    orders = [[Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1)]]
    orders.append([Action("F", 1, 0), Action("F", 1, 1), Action("B", 1, 0), Action("B", 1, 1)])
    with pytest.raises(ValueError, match="rank 0 waits for B0 of stage 1, rank 1 waits for F1 of stage 0"):
        simulate(orders, 2, lambda _: 1.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "zigzag"}, "'zigzag' is not valid (expected one of 'gpipe', '1f1b', 'interleaved')"),
        ({"microbatches": 0}, "microbatches=0 is not valid"),
        ({"microbatches": 1.5}, "microbatches=1.5 is not valid"),
        ({"stages_per_rank": 2}, "schedule='1f1b' has one stage per rank, not 2"),
    ],
)
def test_refusals(arguments: dict[str, object], words: str) -> None:
    options: dict[str, object] = {"name": "1f1b", "ranks": 2, "microbatches": 4, **arguments}
    with pytest.raises(px.errors.UsageError) as caught:
        px.parallel.PipelineSchedule(options.pop("name"), **options)  # type: ignore[arg-type]
    assert words in str(caught.value)
