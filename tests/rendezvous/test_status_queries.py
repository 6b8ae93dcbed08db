"""How long the directory waits for all ranks to say what they are doing."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import pytest

from phalanx.rendezvous import status_queries
from phalanx.rendezvous.status_queries import StatusQueries
from phalanx.wire import control as say


class World:
    """Three ranks of which the first asks, on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.ranks = {0, 1, 2}
        self.told: list[tuple[int, Any]] = []
        monkeypatch.setattr(status_queries.time, "monotonic", lambda: self.now)
        self.queries = StatusQueries(
            self,  # type: ignore[arg-type]
            lambda: self.ranks,
            lambda rank, message: self.told.append((rank, message)),
            lambda rank: (self.now, None) if rank in self.ranks else None,
        )

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        self.timers.append((self.now + seconds, call))

    def wait_until(self, now: float) -> None:
        while due := sorted((timer for timer in self.timers if timer[0] <= now), key=itemgetter(0)):
            self.timers.remove(due[0])
            self.now = due[0][0]
            due[0][1]()
        self.now = now

    def reply(self, rank: int, at: float) -> None:
        self.wait_until(at)
        self.queries.answer(rank, say.StatusReply(1, say.OperationStatus("", 0, 0, "", False, 0.0, "")))

    @property
    def answers(self) -> list[say.Statuses]:
        return [message for rank, message in self.told if rank == 0 and isinstance(message, say.Statuses)]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(monkeypatch)
    made.queries.ask(0, say.StatusQuery(7, b"", 0))
    return made


def test_nobody_waits_once_all_have_answered(world: World) -> None:
    for rank in range(3):
        assert not world.answers
        world.reply(rank, 0.01)
    assert world.answers[0].query == 7
    assert set(world.answers[0].replies) == {0, 1, 2}


def test_a_silent_one_among_quick_ones_is_soon_given_up(world: World) -> None:
    world.reply(0, 0.001)
    world.reply(1, 0.002)
    world.wait_until(status_queries.WAIT)
    assert set(world.answers[0].silent) == {2}


def test_where_others_are_slow_there_is_more_time(world: World) -> None:
    world.reply(0, 0.1)
    world.reply(1, 0.2)
    world.wait_until(1.0)
    assert not world.answers
    world.reply(2, 1.1)
    assert set(world.answers[0].replies) == {0, 1, 2}


def test_but_not_for_ever(world: World) -> None:
    world.reply(0, 0.1)
    world.wait_until(status_queries.SLOW_WAIT)
    assert set(world.answers[0].silent) == {1, 2}


def test_a_rank_that_is_gone_is_not_waited_for(world: World) -> None:
    world.reply(0, 0.01)
    world.reply(1, 0.01)
    world.ranks.discard(2)
    world.queries.gone(2)
    assert set(world.answers[0].replies) == {0, 1}
    assert not world.answers[0].silent


def test_members_of_one_collective_share_an_answer(world: World) -> None:
    world.queries.ask(1, say.StatusQuery(3, b"g", 5))
    asked = len(world.told)
    world.queries.ask(2, say.StatusQuery(4, b"g", 5))
    assert len(world.told) == asked
    world.wait_until(1.5)
    assert {rank for rank, message in world.told if isinstance(message, say.Statuses)} == {0, 1, 2}
