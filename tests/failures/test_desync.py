"""Ranks that call different operations: `Desync` on every member, with both operations and both call sites."""

from __future__ import annotations

import pytest
from tests.failures.ranks import Worlds, worlds  # noqa: F401

DESYNC = """
world = init()
world.barrier()
x = np.ones(6, np.float32)
def odd():
    {odd}
def others():
    {others}
say("ready")
hear()
expect(odd if world.rank == ODD else others)
expect(lambda: world.barrier(), "again")
world.close()
"""

CASES = {
    "another operation": ("world.all_reduce(x)", "world.barrier()"),
    "another root": ("world.broadcast(x, 1)", "world.broadcast(x, 0)"),
    "another size": ("world.all_reduce(x[:3])", "world.all_reduce(x)"),
    "another dtype": ("world.all_reduce(x.astype(np.int32))", "world.all_reduce(x)"),
    "another reduction": ("world.all_reduce(x, op='max')", "world.all_reduce(x)"),
    "another number of calls": ("world.barrier(); world.barrier()", "world.barrier(); world.broadcast(x, 2)"),
    "split": ("world.split(0)", "world.barrier()"),
    "asynchronous": ("world.all_reduce(x, async_op=True).wait()", "world.broadcast(x, 1, async_op=True).wait()"),
}


@pytest.mark.parametrize("case", CASES)
def test_every_member_is_told(worlds: Worlds, case: str) -> None:
    odd, others = CASES[case]
    world = worlds(3, DESYNC.replace("{odd}", odd).replace("{others}", others), ODD=2, host="parent")
    world.wait("ready")
    for rank in world:
        rank.tell()
    for rank in world:
        event = rank.wait("raised")
        if event["type"] == "" and "broadcast" in odd + others:
            event = rank.wait("again")  # a root is done once it has sent; it hears of it at its next call
        assert event["type"] == "Desync", event
        assert event["took"] < 3.0, "about a second, not the deadline"
        both = {event["mine"], event["theirs"]}
        assert any(" in odd" in words for words in both), event
        assert any(" in others" in words for words in both), event
        assert all("world0.py:" in words for words in both), event
        assert "in odd" in event["text"]
        assert "in others" in event["text"]
        event = rank.wait("again")
        assert event["type"] == "Desync", event
        assert event["took"] < 1.0
        assert rank.finish() == 0, rank.errors


def test_ranks_that_all_wait_are_told_within_about_a_second(worlds: Worlds) -> None:
    # Each waits for the other's data, so not one byte is on its way that could give it away.
    world = worlds(
        2,
        """
        world = init()
        world.barrier()
        def waits():
            world.broadcast(np.ones(3), 1 - world.rank)
        expect(waits)
        """,
    )
    for rank in world:
        event = rank.wait("raised")
        assert event["type"] == "Desync", event
        assert event["took"] < 2.0
        assert f"broadcast(src={1 - rank.number})" in event["text"]
        assert f"broadcast(src={rank.number})" in event["text"]


def test_a_desync_in_a_sub_group_leaves_other_groups_alone(worlds: Worlds) -> None:
    world = worlds(
        4,
        """
        world = init()
        half = world.subgroup([0, 1] if world.rank < 2 else [2, 3])
        if world.rank == 0:
            expect(lambda: half.barrier())
        elif world.rank == 1:
            expect(lambda: half.all_reduce(np.ones(1)))
        else:
            half.barrier()
        world.barrier()
        say("went on")
        """,
        host="parent",
    )
    for rank in world.but(2, 3):
        event = rank.wait("raised")
        assert event["type"] == "Desync", event
        assert event["peer"] in (0, 1)
    world.wait("went on")
    assert world.finish() == [0] * 4, "".join(rank.errors for rank in world)
