"""Ctrl-C in the middle of a blocked call returns promptly."""

from __future__ import annotations

import signal

import pytest
from tests.failures.ranks import CONTRACT, Worlds, worlds  # noqa: F401
from tests.lateness import bound


@pytest.mark.parametrize(
    "call",
    ["world.recv(src=1)", "world.recv()", "world.irecv(src=1).wait()", "world.backend.recv(bytearray(8), 1)"],
)
def test_an_interrupted_receive_leaves_the_group_usable(worlds: Worlds, call: str) -> None:
    world = worlds(
        2,
        """
        world = init()
        world.barrier()
        if world.rank == 0:
            say("enter")
            expect(lambda: {call})
            out = bytearray(8)
            {clean}
            say("got", value=float(world.recv(src=1, tag=1)[0]))
        else:
            hear()
            world.send(np.full(2, 4.0), 0, tag=1)
        world.barrier()
        """.replace("{call}", call).replace("{clean}", "pass"),
    )
    world[0].wait("enter")
    world[0].wait_asleep()
    since = world[0].signal(signal.SIGINT)
    event = world[0].wait("raised")
    assert event["type"] == "KeyboardInterrupt", event
    assert event["at"] - since < bound(CONTRACT)
    world[1].tell()
    assert world[0].wait("got")["value"] == 4.0
    assert world.finish() == [0, 0], world[0].errors + world[1].errors


@pytest.mark.parametrize("call", ["barrier()", "all_reduce(np.ones(3))", "all_gather_object(1)"])
def test_a_handler_that_calls_the_group_in_the_middle_of_a_collective_is_told_so(worlds: Worlds, call: str) -> None:
    world = worlds(
        2,
        """
        import signal
        world = init()
        world.barrier()
        if world.rank == 0:
            signal.signal(signal.SIGUSR1, lambda *_: expect(world.barrier))
            say("enter")
        else:
            hear()
        world.{call}
        world.barrier()
        """.replace("{call}", call),
    )
    world[0].wait("enter")
    world[0].wait_asleep()
    since = world[0].signal(signal.SIGUSR1)
    event = world[0].wait("raised")
    assert event["type"] == "UsageError", event
    assert "by the handler of a signal" in event["text"], event
    assert event["at"] - since < bound(CONTRACT)
    world[1].tell()
    assert world.finish() == [0, 0], world[0].errors + world[1].errors


@pytest.mark.parametrize("call", ["barrier()", "all_reduce(np.ones(3))", "barrier(async_op=True).wait()"])
def test_an_interrupted_collective_breaks_the_group_for_all(worlds: Worlds, call: str) -> None:
    world = worlds(
        3,
        """
        world = init()
        world.barrier()
        if world.rank == 2:
            hear()
        say("enter")
        expect(lambda: world.{call})
        expect(lambda: world.barrier(), "again")
        """.replace("{call}", call),
    )
    for rank in world.but(2):
        rank.wait("enter")
        rank.wait_asleep()
    since = world[0].signal(signal.SIGINT)
    event = world[0].wait("raised")
    assert event["type"] == "KeyboardInterrupt", event
    assert event["at"] - since < bound(CONTRACT)
    if "async" in call:
        return  # the operation itself goes on
    event = world[1].wait("raised")
    assert "PhalanxError" in event["kinds"], event
    assert event["at"] - since < bound(CONTRACT)
    world[2].tell()
    for rank in world:
        event = rank.wait("again")
        assert "PhalanxError" in event["kinds"], event
        assert event["took"] < bound(CONTRACT)


@pytest.mark.parametrize(
    "call",
    {
        "fast path": "all_reduce(x, async_op=True)",
        "after a broadcast": "all_reduce(x, async_op=True)",
        "general way": "all_reduce_many([x], async_op=True)",
    }.items(),
    ids=lambda item: item[0],
)
def test_an_interrupted_wait_leaves_the_collective_under_way(worlds: Worlds, call: tuple[str, str]) -> None:
    world = worlds(
        2,
        """
        world = init()
        world.barrier()
        if {broadcast}:
            world.broadcast(np.ones(1), 0)
        if world.rank == 1:
            hear()
        x = np.full(3, world.rank + 1.0)
        work = world.{call}
        again = world.all_reduce(np.ones(2), async_op=True)
        if world.rank == 0:
            say("enter")
            expect(lambda: again.wait())
        again.wait()
        work.wait()
        say("got", value=float(x[0]))
        world.barrier()
        """.replace("{call}", call[1]).replace("{broadcast}", str("broadcast" in call[0])),
    )
    world[0].wait("enter")
    world[0].wait_asleep()
    since = world[0].signal(signal.SIGINT)
    event = world[0].wait("raised")
    assert event["type"] == "KeyboardInterrupt", event
    assert event["at"] - since < bound(CONTRACT)
    world[1].tell()
    assert [rank.wait("got")["value"] for rank in world] == [3.0, 3.0]
    assert world.finish() == [0, 0], world[0].errors + world[1].errors


def test_an_interrupted_send_of_a_large_message(worlds: Worlds) -> None:
    world = worlds(
        2,
        """
        world = init()
        world.barrier()
        if world.rank == 0:
            say("enter")
            expect(lambda: world.send(np.zeros(64 << 20, np.uint8), 1))
        else:
            hear()
        world.close()
        say("closed")
        """,
    )
    world[0].wait("enter")
    world[0].wait_asleep()
    since = world[0].signal(signal.SIGINT)
    event = world[0].wait("raised")
    assert event["type"] == "KeyboardInterrupt", event
    assert event["at"] - since < bound(CONTRACT)
    world[1].tell()
    world.wait("closed")


def test_ctrl_c_while_the_world_forms(worlds: Worlds) -> None:
    world = worlds(
        3,
        """
        before = descriptors(), threads()
        say("enter")
        expect(lambda: init(timeout=60))
        say("left", before=before, after=(descriptors(), threads(before[1])))
        """,
        started=2,
    )
    for rank in world:
        rank.wait("enter")
        rank.wait_asleep()
    for rank in reversed(world.ranks):
        since = rank.signal(signal.SIGINT)
        event = rank.wait("raised")
        assert event["type"] == "KeyboardInterrupt", event
        assert event["at"] - since < bound(CONTRACT)
        left = rank.wait("left")
        assert left["after"] == left["before"]
