"""An exception that leaves the program of one rank ends the world for all, with its traceback; so does `abort`."""

from __future__ import annotations

import signal

import pytest
from tests.failures.ranks import CONTRACT, Worlds, assert_lost, worlds  # noqa: F401
from tests.lateness import bound

PROMPT = 10.0
"""Seconds within which a process ends that has nothing to wait for; most of it is for a loaded machine."""

STYLES = {
    "with": """
with init() as world:
    work(world)
""",
    "no with": """
world = init()
work(world)
""",
    "in a function": """
def main():
    world = init()
    work(world)
main()
""",
}

RAISES = """
def train(step):
    if step == 3:
        say("raising")
        raise ValueError("batch 17 is empty")

def work(world):
    world.barrier()
    for step in range(10):
        world.all_reduce(np.ones(10))
        if world.rank == FAILING:
            hear()
            train(3)
    say("enter")
"""


@pytest.mark.parametrize(
    ("style", "host", "failing"),
    [("with", "rank0", 0), ("no with", "rank0", 0), ("no with", "rank0", 1), ("in a function", "parent", 0)],
    ids=str,
)
def test_an_exception_ends_the_world(worlds: Worlds, style: str, host: str, failing: int) -> None:
    world = worlds(3, RAISES + STYLES[style], host=host, FAILING=failing)
    world.wait("joined")
    for rank in world.but(failing):
        rank.wait_asleep()
    world[failing].tell()
    assert world[failing].finish(PROMPT) == 1
    for rank in world.but(failing):
        assert rank.finish(PROMPT) == 1
        assert not rank.said("enter")
        # One line: the rank that raised prints its own traceback.
        assert len(rank.errors.splitlines()) == 1, rank.errors
        assert f"ended because of rank {failing}: it raised ValueError: batch 17 is empty at " in rank.errors
        assert " in train (during " in rank.errors
    assert "PeerLost" not in world[failing].errors
    assert world[failing].errors.rstrip().endswith("ValueError: batch 17 is empty")


def test_the_traceback_is_in_the_error(worlds: Worlds) -> None:
    world = worlds(
        4,
        """
        with init() as world:
            world.barrier()
            if world.rank == 3:
                hear()
                say("raising")
                raise RuntimeError("words")
            if world.rank == 2:
                hear()  # busy elsewhere
            expect(lambda: world.recv(src=0) if world.rank else world.recv(src=1))
            expect(lambda: world.barrier(), "again")
        """,
        host="parent",
    )
    world.wait("joined")
    for rank in world:
        rank.wait_asleep()
    world[3].tell()
    since = world[3].wait("raising")["at"]
    for rank in world.but(2, 3):
        assert_lost(rank.wait("raised"), 3, since)
    world[2].tell()
    for rank in world.but(3):
        for name in ("raised", "again"):
            event = rank.wait(name)
            assert (event["type"], event["peer"]) == ("PeerLost", 3), event
            assert "RuntimeError: words" in event["remote_traceback"]
            assert event["reason"] == "it raised RuntimeError: words"
            assert "Traceback of rank 3:" in event["text"]
        assert rank.finish(PROMPT) == 0, rank.errors
    assert world[3].finish(PROMPT) == 1


@pytest.mark.parametrize(
    ("style", "ending", "code", "kind"),
    [
        ("with", "sys.exit(3)", 3, "PeerLost"),
        ("with", "sys.exit('words')", 1, "PeerLost"),
        ("with", "sys.exit()", 0, "ChannelClosed"),
        # An interpreter tells nobody that it ends by sys.exit: to the others it is a rank that closed its world.
        ("no with", "sys.exit(3)", 3, "ChannelClosed"),
        ("no with", "sys.exit(0)", 0, "ChannelClosed"),
    ],
)
def test_sys_exit(worlds: Worlds, style: str, ending: str, code: int, kind: str) -> None:
    script = """
def work(world):
    world.barrier()
    if world.rank == 1:
        hear()
        say("raising")
        {ending}
    expect(lambda: world.barrier())
"""
    world = worlds(3, script.replace("{ending}", ending) + STYLES[style])
    world.wait("joined")
    for rank in world.but(1):
        rank.wait_asleep()
    world[1].tell()
    since = world[1].wait("raising")["at"]
    assert world[1].finish(PROMPT) == code
    for rank in world.but(1):
        event = rank.wait("raised")
        assert_lost(event, 1, since)
        assert event["type"] == kind, event
        assert rank.finish(PROMPT) == 0, rank.errors


@pytest.mark.parametrize("style", ["with", "no with"])
def test_ctrl_c_on_one_rank_ends_the_world(worlds: Worlds, style: str) -> None:
    script = """
def work(world):
    world.barrier()
    say("enter")
    if world.rank == 0:
        world.barrier()
    if world.rank == 2:
        hear()
    expect(lambda: world.barrier())
"""
    world = worlds(3, script + STYLES[style])
    world.wait("enter")
    for rank in world:
        rank.wait_asleep()
    since = world[0].signal(signal.SIGINT)
    assert world[0].finish(PROMPT) in (1, 130, -signal.SIGINT)
    assert "KeyboardInterrupt" in world[0].errors
    world[2].tell()
    for rank in world.but(0):
        event = rank.wait("raised")
        assert_lost(event, 0, since if rank.number == 1 else event["at"])
        assert "KeyboardInterrupt" in (event["remote_traceback"] or ""), event
        assert rank.finish(PROMPT) == 0, rank.errors


@pytest.mark.parametrize(("host", "group"), [("rank0", "world"), ("parent", "half")])
def test_abort(worlds: Worlds, host: str, group: str) -> None:
    world = worlds(
        3,
        """
        world = init()
        half = world.subgroup([0, 1]) if world.rank < 2 else None
        world.barrier()
        if world.rank == 0:
            hear()
            say("aborting")
            {group}.abort("the loss is not a number")
        expect(lambda: world.barrier())
        expect(lambda: world.recv(src=1) if world.rank != 1 else world.recv(src=2), "again")
        expect(lambda: world.abort("another reason"), "abort again")
        world.close()
        """.replace("{group}", group),
        host=host,
    )
    for rank in world.but(0):
        rank.wait("joined")
        rank.wait_asleep()
    world[0].tell()
    since = world[0].wait("aborting")["at"]
    for rank in world:
        assert_lost(rank.wait("raised"), 0, since)
        for name in ("raised", "again"):
            event = rank.wait(name)
            assert event["type"] == "PeerLost"
            assert event["reason"] == "it aborted the world: the loss is not a number", event
        assert rank.wait("abort again")["took"] < bound(CONTRACT)
        assert rank.finish(PROMPT) == 0, rank.errors


def test_an_exception_in_a_thread_does_not_end_the_program_nor_the_world(worlds: Worlds) -> None:
    world = worlds(
        2,
        """
        world = init()
        if world.rank == 0:
            thread = threading.Thread(target=lambda: 1 / 0)
            thread.start()
            thread.join()
        world.barrier()
        say("enter")
        """,
    )
    assert world.finish() == [0, 0], world[0].errors + world[1].errors
    world.wait("enter")
    assert "ZeroDivisionError" in world[0].errors


def test_all_see_the_first_of_several_exceptions(worlds: Worlds) -> None:
    world = worlds(
        4,
        """
        with init() as world:
            world.barrier()
            if world.rank >= 2:
                hear()
                raise RuntimeError(f"of rank {world.rank}")
            expect(lambda: world.recv(src=3 - world.rank))
        """,
        host="parent",
    )
    world.wait("joined")
    for rank in world:
        rank.wait_asleep()
    for rank in world.but(0, 1):
        rank.tell()
    blamed = {rank.wait("raised")["peer"] for rank in world.but(2, 3)}
    assert len(blamed) == 1, blamed
    assert blamed <= {2, 3}
    assert [rank.finish(PROMPT) for rank in world] == [0, 0, 1, 1]
