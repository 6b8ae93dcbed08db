"""The directory's decision on the next view of a group, driven by hand: who asked, who is alive, what time it is."""

from __future__ import annotations

import itertools
import random

import pytest

from phalanx.rendezvous.views import Decided, LateMember, Outcome, Refusal, Views
from phalanx.wire.control import Regroup

CONTEXT = b"a group"


class World:
    """Some ranks that ask, die and come."""

    def __init__(self, *members: int) -> None:
        self.members = list(members)
        self.alive = set(members)
        self.views = Views(self.alive.__contains__)

    def ask(
        self, rank: int, *, seconds: float = 10.0, now: float = 0.0, minimum: int = 1, joins: bool = False
    ) -> list[Outcome]:
        request = Regroup(CONTEXT, 0, self.members, seconds, minimum, joins, True)
        return self.views.ask(rank, request, now)

    def join(self, rank: int, now: float = 0.0) -> list[Outcome]:
        self.alive.add(rank)
        return self.views.ask(rank, Regroup(b"", 0, [rank], 10.0, joins=True, is_world=True), now)

    def die(self, rank: int) -> list[Outcome]:
        self.alive.discard(rank)
        return self.views.gone(rank)


def decided(outcomes: list[Outcome]) -> Decided:
    (view,) = outcomes
    assert isinstance(view, Decided)
    return view


def refused(outcomes: list[Outcome]) -> Refusal:
    (refusal,) = outcomes
    assert isinstance(refusal, Refusal)
    return refusal


def test_a_view_needs_all_that_are_alive() -> None:
    world = World(0, 1, 2, 3)
    assert world.die(2) == []
    assert world.ask(0) == []
    assert world.ask(3) == []
    view = decided(world.ask(1))
    assert (view.members, view.epoch, view.lost, view.out) == ([0, 1, 3], 1, [2], [])


def test_who_asks_and_dies_is_not_in_the_view() -> None:
    world = World(0, 1, 2, 3)
    world.die(0)
    world.ask(1)
    world.ask(2)
    assert world.die(2) == []
    assert decided(world.ask(3)).members == [1, 3]


def test_the_death_of_the_last_one_missing_completes_it() -> None:
    world = World(0, 1, 2, 3)
    world.die(0)
    world.ask(1)
    world.ask(2)
    assert decided(world.die(3)).members == [1, 2]


def test_a_slow_member_is_voted_out_at_the_earliest_deadline() -> None:
    world = World(0, 1, 2)
    world.ask(0, seconds=5.0)
    world.ask(2, seconds=1.0)
    assert world.views.next_deadline() == 1.0
    assert world.views.expire(0.9) == []
    view = decided(world.views.expire(1.0))
    assert (view.members, view.out, view.lost) == ([0, 2], [1], [])
    assert world.ask(1, now=1.1) == [LateMember(1, CONTEXT, True)]


def test_the_smaller_side_is_refused() -> None:
    world = World(0, 1, 2, 3, 4)
    world.ask(0, seconds=1.0)
    world.ask(1, seconds=1.0)
    refusal = refused(world.views.expire(1.0))
    assert (refusal.asked, refusal.missing) == ([0, 1], [2, 3, 4])
    assert world.ask(0, now=2.0) == []  # it may ask again, and the others too
    for rank in (1, 2, 3):
        world.ask(rank, now=2.0)
    assert decided(world.ask(4, now=2.0)).members == [0, 1, 2, 3, 4]


def test_half_is_enough() -> None:
    world = World(0, 1)
    world.ask(1, seconds=1.0)
    assert decided(world.views.expire(1.0)).members == [1]


def test_below_the_minimum_a_view_waits_for_ranks_that_join() -> None:
    world = World(0, 1, 2)
    world.die(1)
    world.die(2)
    assert world.ask(0, minimum=2, joins=True) == []
    view = decided(world.join(3))
    assert (view.members, view.joined) == ([0, 3], [3])


def test_below_the_minimum_the_deadline_refuses() -> None:
    world = World(0, 1)
    world.die(1)
    world.ask(0, minimum=2, seconds=3.0)
    assert "1 of at least 2" in refused(world.views.expire(3.0)).reason


def test_a_rank_joins_only_where_the_members_say_so() -> None:
    world = World(0, 1)
    assert world.join(2) == []
    assert world.views.arrivals == 1
    world.ask(0, joins=True)
    assert decided(world.ask(1, joins=True)).members == [0, 1, 2]
    assert world.views.arrivals == 0


def test_a_rank_that_waits_in_vain_is_told() -> None:
    world = World(0, 1)
    world.join(2)
    assert refused(world.views.expire(10.0)).asked == [2]
    world.join(3)
    assert refused(world.views.end("they are done")).over


def test_members_that_disagree_on_the_group_are_refused() -> None:
    world = World(0, 1, 2)
    world.ask(0)
    outcome = world.views.ask(1, Regroup(CONTEXT, 0, [0, 1], 10.0), 0.0)
    assert refused(outcome).asked == [1]
    assert refused(world.views.ask(7, Regroup(CONTEXT, 0, [0, 1, 2], 10.0), 0.0)).asked == [7]


@pytest.mark.parametrize("seed", range(200))
def test_no_two_views_of_one_group(seed: int) -> None:
    chance = random.Random(seed)
    size = chance.randint(1, 6)
    world = World(*range(size))
    now, views = 0.0, []
    numbers = itertools.count(size)
    evicted: set[int] = set()
    for _ in range(60):
        now += chance.random()
        event = chance.choice(["ask", "ask", "die", "expire", "join"])
        living = [rank for rank in world.members if rank in world.alive]
        if event == "ask" and living:
            outcomes = world.ask(chance.choice(living), seconds=chance.random() * 3, now=now, joins=True)
        elif event == "die" and world.alive and chance.random() < 0.3:
            outcomes = world.die(chance.choice(sorted(world.alive)))
        elif event == "join" and chance.random() < 0.3:
            outcomes = world.join(next(numbers), now)
        else:
            outcomes = world.views.expire(now)
        views += [outcome for outcome in outcomes if isinstance(outcome, Decided)]
        for view in views:
            evicted |= set(view.out)
        late = [outcome for outcome in outcomes if isinstance(outcome, LateMember)]
        assert all(views for _ in late)
    assert len(views) <= 1
    for view in views:
        assert view.members
        assert not evicted & set(view.members)
        assert len(set(view.members)) == len(view.members)
