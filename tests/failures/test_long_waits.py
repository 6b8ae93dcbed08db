"""Ranks that wait for long in a collective say for whom, well before their deadline. The first speaks for all."""

from __future__ import annotations

import time

import pytest
from tests.failures.ranks import Worlds, worlds  # noqa: F401

WAIT = """
from phalanx.group.tracking import long_waits
long_waits.FIRST = 0.5
class Words(__import__("logging").Handler):
    def emit(self, record):
        say("word", text=record.getMessage())
__import__("logging").getLogger("phalanx.group").addHandler(Words())
world = init(options=px.Options(heartbeat=0.1))
world.barrier()
if world.rank == 1:
    say("evaluating")
    hear()
world.all_reduce(np.ones(WORDS), timeout=50)
say("done")
world.barrier()
"""


@pytest.mark.parametrize(
    "env", [{}, {"PHALANX_TRANSPORT": "tcp"}, {"PHALANX_PURE": "1"}], ids=["segment", "tcp", "pure"]
)
def test_the_first_that_waits_says_who_is_missing_and_where(worlds: Worlds, env: dict[str, str]) -> None:
    world = worlds(3, WAIT, env=env, WORDS=3, host="parent")
    world[1].wait("evaluating")
    words = world[0].wait("word")["text"]
    head, line = words.splitlines()
    assert head.startswith("rank 0: all_reduce(op=sum) #2 at ")
    assert "has been waiting for" in head
    assert head.endswith("missing: 1")
    assert line.startswith("  rank 1 is in no operation; it finished barrier #1 at ")
    assert line.rpartition("; it is at ")[2].endswith(" in hear")
    world[0].wait("word", count=2)  # and again, later
    world[1].tell()
    for rank in world:
        rank.wait("done")
    assert world.finish() == [0] * 3
    assert not world[2].said("word"), "one speaks for all"
    assert not world[1].said("word")


def test_nothing_is_said_of_a_rank_that_does_something_else(worlds: Worlds) -> None:
    world = worlds(2, WAIT.replace("if world.rank == 1", "if True"), WORDS=3, host="parent")
    for rank in world:
        rank.wait("evaluating")
    time.sleep(1.5)
    for rank in world:
        rank.tell()
    for rank in world:
        rank.wait("done")
    assert world.finish() == [0] * 2
    assert not any(rank.said("word") for rank in world)
