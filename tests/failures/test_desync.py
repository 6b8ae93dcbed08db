"""Ranks that call different operations: `Desync` on every member, with both operations and both call sites."""

from __future__ import annotations

import re

import pytest
from tests.failures.ranks import Worlds, worlds  # noqa: F401
from tests.lateness import bound

CASES = {
    "another operation": ("g.all_reduce(x)", "g.barrier()"),
    "another root": ("g.broadcast(x, 1)", "g.broadcast(x, 0)"),
    "another size": ("g.all_reduce(x[:3])", "g.all_reduce(x)"),
    "another shape": ("g.all_reduce(x.reshape(3, 2))", "g.all_reduce(x.reshape(2, 3))"),
    "a shape of more dims": ("g.all_gather(x[:, None])", "g.all_gather(x)"),
    "a scalar": ("g.broadcast(np.ones(()), 0)", "g.broadcast(np.ones(1), 0)"),
    "another list": ("g.all_reduce_many([x, x])", "g.all_reduce_many([x, x.reshape(2, 3)])"),
    "another dtype": ("g.all_reduce(x.astype(np.int32))", "g.all_reduce(x)"),
    "another reduction": ("g.all_reduce(x, op='max')", "g.all_reduce(x)"),
    "another number of calls": ("g.barrier(); g.barrier()", "g.barrier(); g.broadcast(x, 2)"),
    "another root to gather at": ("g.gather(x, 1)", "g.gather(x, 0)"),
    "another reduction at a root": ("g.reduce(x, 0, op='max')", "g.reduce(x, 0)"),
    "to a root and from it": ("g.gather(x, 0)", "g.broadcast(x, 0)"),
    "split": ("g.split(0)", "g.barrier()"),
    "asynchronous": ("g.all_reduce(x, async_op=True).wait()", "g.broadcast(x, 1, async_op=True).wait()"),
}

SHAPES = {
    "another size": ("float32[3]", "float32[6]"),
    "another shape": ("float32[3, 2]", "float32[2, 3]"),
    "a shape of more dims": ("float32[6, 1]", "float32[6]"),
    "a scalar": ("float64[]", "float64[1]"),
    "another list": ("float32[6], float32[6]", "float32[6], float32[2, 3]"),
}
"""What the two sides must name."""

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
            if event["type"] == "" and re.search(r"broadcast|scatter|\b(?:gather|reduce)\b", "".join(calls)):
                event = again  # who only had to send is done; it hears of it at its next call
            assert event["type"] == again["type"] == "Desync", (case, rank.number, event)
            assert event["took"] < bound(3.0), "about a second, not the deadline"
            assert again is event or again["took"] < bound(1.0)
            both = {event["mine"], event["theirs"]}
            assert any(" in odd" in words for words in both), (case, event)
            assert any(" in others" in words for words in both), (case, event)
            assert all("world0.py:" in words for words in both), (case, event)
            assert all(words in event["text"] for words in both), (case, event)
            for shape in SHAPES.get(case, ()):
                assert any(shape in words for words in both), (case, event)
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


@pytest.mark.parametrize("late", [{1: 0.8, 2: 0.1}, {1: 0.8}], ids=["two", "one"])
def test_a_rank_that_is_slow_to_answer_is_named_with_its_call(worlds: Worlds, late: dict[int, float]) -> None:
    # As on a busy machine. If an answer was late, the directory waits longer for the others; else they are asked again.
    world = worlds(
        3,
        """
        world = init()
        world.barrier()
        status = world._control.status
        def first_answer_late(*asked):
            time.sleep(LATE.pop(world.rank, 0.0))
            return status(*asked)
        world._control.status = first_answer_late
        expect(lambda: world.all_reduce(np.ones(3)) if world.rank == 1 else world.barrier())
        """,
        LATE=late,
        host="parent",
    )
    for rank in world:
        event = rank.wait("raised")
        assert event["type"] == "Desync", event
        assert {event["mine"].split(" #")[0], event["theirs"].split(" #")[0]} == {"all_reduce(op=sum)", "barrier"}, (
            event
        )


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


ROOTS = """
world = init()
for turn, after in enumerate(AFTER):
    group = world.subgroup([0, 1])
    group.barrier()
    x = np.full(4, float(world.rank))
    world.barrier()
    def program():
        if world.rank == SECOND[turn]:
            hear()
        group.broadcast(x, world.rank)  # each takes itself for the root
        say("root")
        if after == "message" and world.rank == 0: group.send(x, 1)
        if after == "message" and world.rank == 1: group.recv(np.zeros(4), 0)
        if after == "collective": group.barrier()
        if after == "with":
            with group:
                pass
        group.close()
        say("closed")
    expect(program, "told")
    expect(group.close, "closed again")
    world.barrier()
with world.subgroup([0, 1]) as group:
    group.barrier()
    try:
        with group:
            if world.rank == 1: hear()
            group.broadcast(np.ones(4), world.rank)
            say("last root")
            raise KeyError("of the program")
    except BaseException as error:
        tell_error("masked", error)
world.barrier()
"""


def test_two_ranks_that_take_themselves_for_the_root(worlds: Worlds) -> None:
    # A root waits for nobody: at the latest its close has to tell.
    after = ["close", "message", "collective", "with", "close"]
    second = [1, 1, 1, 1, 0]
    world = worlds(2, ROOTS, AFTER=after, SECOND=second, host="parent")
    for turn, _ in enumerate(after, 1):
        first = world[1 - second[turn - 1]]
        first.wait("root", count=sum(1 - s == first.number for s in second[:turn]))
        world[second[turn - 1]].tell()
        for rank in world:
            event = rank.wait("told", count=turn)
            assert event["type"] == "Desync", (turn, rank.number, event)
            assert {"broadcast(src=0)", "broadcast(src=1)"} == {
                words.split(" #")[0] for words in (event["mine"], event["theirs"])
            }
            assert rank.wait("closed again", count=turn)["type"] == "", "told once"
    world[0].wait("last root")
    world[1].tell()
    assert world[0].wait("masked")["type"] == "KeyError"
    assert world[1].wait("masked")["type"] == "Desync"
    assert world.finish() == [0, 0], world[0].errors + world[1].errors


def test_a_root_that_has_gone_before_the_other_calls(worlds: Worlds) -> None:
    world = worlds(
        2,
        """
        world = init()
        group = world.subgroup([0, 1])
        group.barrier()
        if world.rank == 1: hear()
        expect(lambda: group.broadcast(np.ones(4), world.rank))
        group.close()
        say("closed")
        world.barrier()
        """,
        host="parent",
    )
    world[0].wait("closed")  # it has waited a moment, and nobody came
    world[1].tell()
    assert (world[0].wait("raised")["type"], world[1].wait("raised")["type"]) == ("", "Desync")
    assert world.finish() == [0, 0], world[0].errors + world[1].errors


def test_ranks_that_all_only_send_are_told_when_they_close(worlds: Worlds) -> None:
    # Nobody waits for anything, so nobody can notice before.
    world = worlds(
        3,
        """
        world = init()
        group = world.subgroup(range(3))
        group.barrier()
        def program():
            group.broadcast(np.ones(4), 0) if world.rank == 0 else group.gather(np.ones(4), 0)
            group.close()
        expect(program, "told")
        world.barrier()
        """,
        host="parent",
    )
    for rank in world:
        event = rank.wait("told")
        assert event["type"] == "Desync", (rank.number, event)
        assert {words.split(" #")[0] for words in (event["mine"], event["theirs"])} == {
            "broadcast(src=0)",
            "gather(dst=0)",
        }
    assert world.finish() == [0, 0, 0], "".join(rank.errors for rank in world)
