"""Ranks that call different operations: `Desync` on every member, with both operations and both call sites."""

from __future__ import annotations

from tests.failures.ranks import Worlds, worlds  # noqa: F401
from tests.lateness import bound

CASES = {
    "another operation": ("g.all_reduce(x)", "g.barrier()"),
    "another root": ("g.broadcast(x, 1)", "g.broadcast(x, 0)"),
    "another size": ("g.all_reduce(x[:3])", "g.all_reduce(x)"),
    "another dtype": ("g.all_reduce(x.astype(np.int32))", "g.all_reduce(x)"),
    "another reduction": ("g.all_reduce(x, op='max')", "g.all_reduce(x)"),
    "another number of calls": ("g.barrier(); g.barrier()", "g.barrier(); g.broadcast(x, 2)"),
    "split": ("g.split(0)", "g.barrier()"),
    "asynchronous": ("g.all_reduce(x, async_op=True).wait()", "g.broadcast(x, 1, async_op=True).wait()"),
}

SCRIPT = """
world = init()
x = np.ones(6, np.float32)
def odd(case, g):
{odd}
def others(case, g):
{others}
for case in CASES:
    group = world.subgroup(range(world.world_size))
    group.barrier()
    world.barrier()
    expect(lambda: (odd if world.rank == ODD else others)(case, group), case)
    expect(lambda: group.barrier(), case + ", again")
    group.close()
world.barrier()
"""


def test_every_member_is_told(worlds: Worlds) -> None:
    odd, others = (
        "\n".join(f"    if case == {case!r}: {calls[side]}" for case, calls in CASES.items()) for side in (0, 1)
    )
    script = SCRIPT.replace("{odd}", odd).replace("{others}", others)
    world = worlds(3, script, ODD=2, CASES=list(CASES), host="parent")
    for case, calls in CASES.items():
        for rank in world:
            event, again = rank.wait(case), rank.wait(f"{case}, again")
            if event["type"] == "" and "broadcast" in "".join(calls):
                event = again  # who only had to send is done; it hears of it at its next call
            assert event["type"] == again["type"] == "Desync", (case, rank.number, event)
            assert event["took"] < bound(3.0), "about a second, not the deadline"
            assert again is event or again["took"] < bound(1.0)
            both = {event["mine"], event["theirs"]}
            assert any(" in odd" in words for words in both), (case, event)
            assert any(" in others" in words for words in both), (case, event)
            assert all("world0.py:" in words for words in both), (case, event)
            assert all(words in event["text"] for words in both), (case, event)
    assert world.finish() == [0, 0, 0], "".join(rank.errors for rank in world)


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
        assert event["took"] < bound(2.0)
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
