"""Deadlines: a `Timeout` says who had arrived, and what the missing ones were last seen doing."""

from __future__ import annotations

import os
import signal
import time

import pytest
from tests.failures.ranks import CONTRACT, Worlds, directory_of, worlds  # noqa: F401
from tests.lateness import bound

PATIENCE = 1.5
"""Seconds of the deadlines here."""
NOTICED = PATIENCE + 1.5
"""The deadline, and what the directory is given to say what others are doing."""

STOPPED = """
world = init()
world.barrier()
world.barrier()  # the last
if world.rank == VICTIM:
    time.sleep(0.6)  # several heartbeats, which tell the directory what was done last
    say("ready")
    expect(hear, "resumed")
say("enter")
hear()
expect(lambda: {call})
expect(lambda: world.barrier(), "again")
"""


@pytest.mark.parametrize(
    ("call", "host", "victim"),
    [
        ("barrier", "parent", 0),
        ("barrier", "parent", 2),
        ("barrier", "rank0", 1),
        ("barrier", "rank0", 0),
        ("all_reduce", "rank0", 0),
        ("all_reduce", "parent", 1),
    ],
)
def test_a_stopped_rank_is_named(worlds: Worlds, host: str, victim: int, call: str) -> None:
    calls = {
        "barrier": f"world.barrier(timeout={PATIENCE})",
        "all_reduce": f"world.all_reduce(np.ones(5), timeout={PATIENCE})",
    }
    script = STOPPED.replace("{call}", calls[call])
    world = worlds(3, script, host=host, env={"PHALANX_HEARTBEAT": "0.1"}, VICTIM=victim)
    world[victim].wait("ready")
    survivors = world.but(victim)
    for rank in survivors:
        rank.wait("enter")
    world[victim].stop()
    for rank in survivors:
        rank.tell()
    for rank in survivors:
        event = rank.wait("raised")
        assert event["type"] == "Timeout", event
        assert event["missing"] == [victim], event
        assert event["peer"] == victim
        assert event["took"] < bound(NOTICED)
        assert f"{call}" in event["operation"]
        assert "world0.py:" in event["text"], "the call site"
        assert f"rank {victim} does not answer" in event["text"], event["text"]
        names = ", ".join(str(r.number) for r in survivors)
        assert f"arrived: {names}" in event["text"]
        assert event["arrived"] == [r.number for r in survivors]
        assert f"finished barrier #2 at {worlds.site('# the last')}" in event["text"], event["text"]
        event = rank.wait("again")
        assert (event["type"], event["missing"]) == ("Timeout", [victim]), event
        assert event["took"] < bound(CONTRACT), "a broken group raises at once"
    world[victim].signal(signal.SIGCONT)
    world[victim].tell()
    world[victim].tell()
    # It comes back to a world that went on without it, and says so: with its second call, if what the others had sent
    # before they gave up was all that it needed for the first.
    event = world[victim].wait("again")
    assert event["type"] in ("Timeout", "PeerLost"), event


def test_members_tell_each_other_where_no_directory_can(worlds: Worlds) -> None:
    # Rank 0 and the directory are stopped. Rank 2 waits for rank 1, which gives up waiting for both.
    world = worlds(
        3,
        """
        world = init()
        world.barrier()
        for peer in (1, 2):
            if world.rank == peer:
                world.send(np.zeros(1), 3 - peer)
            elif world.rank == 3 - peer:
                world.recv(src=peer)
        say("ready")
        hear()
        if world.rank == 1:
            expect(lambda: world.barrier(timeout=1.0))
        else:
            say("enter")
            expect(lambda: world.recv(src=1, timeout=20))
            expect(lambda: world.barrier(), "again")
        """,
    )
    world.wait("ready")
    world[0].stop()
    hosted = directory_of(worlds, world[0])
    os.kill(hosted, signal.SIGSTOP)
    world[2].tell()
    world[2].wait("enter")
    world[1].tell()
    first = world[1].wait("raised")
    assert (first["type"], first["missing"]) == ("Timeout", [0, 2]), first
    for name in ("raised", "again"):
        event = world[2].wait(name)
        assert (event["type"], event["missing"]) == ("Timeout", [0, 2]), event
        assert "on rank 1: barrier #2" in event["text"], event
    os.kill(hosted, signal.SIGCONT)
    assert world[2].wait("raised")["at"] - first["at"] < bound(CONTRACT)


def test_a_slow_rank_is_told_from_a_stopped_one(worlds: Worlds) -> None:
    world = worlds(
        3,
        """
        world = init()
        world.barrier()
        def train():
            expect(lambda: world.recv(src=0, tag=7, timeout=20), "end")
        if world.rank == 1:
            say("enter")
            train()
        elif world.rank == 2:
            say("enter")
            hear()
            expect(lambda: world.barrier(), "end")
        else:
            hear()
            expect(lambda: world.barrier(timeout=0.5))
        """,
    )
    for rank in world.but(0):
        rank.wait("enter")
        rank.wait_asleep()
    world[0].tell()
    event = world[0].wait("raised")
    assert event["missing"] == [1, 2], event
    assert event["arrived"] == [0], event
    receiving, barrier = worlds.site("tag=7"), worlds.site("world.barrier()")
    assert f"  rank 1 is in recv(src=0, tag=7) at {receiving} in " in event["text"], event["text"]
    assert f"  rank 2 is in no operation; it finished barrier #1 at {barrier} in " in event["text"], event["text"]
    # The group is broken for all: nobody waits for the rest of their own deadlines.
    assert world[1].wait("end")["type"] == "Timeout"
    world[2].tell()
    event = world[2].wait("end")
    assert event["type"] == "Timeout"
    assert "on rank 0: " in event["text"]


def test_a_receive_that_timed_out_does_not_break(worlds: Worlds) -> None:
    world = worlds(
        2,
        """
        world = init()
        world.barrier()
        if world.rank == 0:
            expect(lambda: world.recv(src=1, timeout=0.2))
            expect(lambda: world.recv(timeout=0.2), "any")
            work = world.irecv(src=1, timeout=0.2)
            expect(lambda: work.wait(), "work")
            expect(lambda: world.backend.recv(bytearray(8), 1, timeout=0.2), "raw")
            world.barrier()
            a, b = world.recv(src=1), world.recv(src=1)
            raw = bytearray(8)
            world.backend.recv(raw, 1)
            say("got", values=[float(a[0]), float(b[0])], raw=raw.decode())
        else:
            world.barrier()
            world.send(np.full(1 << 20, 1.0), 0)
            world.send(np.full(1 << 20, 2.0), 0)
            world.backend.send(b"rawbytes", 0)
        world.barrier()
        """,
    )
    for name in ("raised", "any", "work", "raw"):
        event = world[0].wait(name)
        assert event["type"] == "Timeout", event
        assert event["missing"] == [1]
        assert 0.1 < event["took"] < bound(0.2 + 1.5)
    event = world[0].wait("got")
    assert (event["values"], event["raw"]) == ([1.0, 2.0], "rawbytes")
    assert world.finish() == [0, 0], world[0].errors + world[1].errors


def test_a_receive_that_timed_out_halfway_keeps_the_message(worlds: Worlds) -> None:
    world = worlds(
        2,
        """
        world = init()
        big = np.arange(16 << 20, dtype=np.uint32)
        if world.rank == 0:
            hear()
            out = np.zeros_like(big)
            expect(lambda: world.recv(out, src=1, timeout=0.3))
            say("timed out", untouched=bool((out == 0).all()))
            hear()
            again = world.recv(src=1)
            say("got", equal=bool((again == big).all()))
        else:
            say("ready")
            hear()
            say("go")
            world.send(big, 0)
        """,
    )
    # The sender stops in the middle: the first part of its message has been received by then.
    world[1].wait("ready")
    world[0].wait("joined")
    world[1].tell()
    world[1].wait("go")
    world[1].wait_asleep()
    world[1].stop()
    world[0].tell()
    assert world[0].wait("raised")["type"] == "Timeout"
    world[0].wait("timed out")
    world[1].signal(signal.SIGCONT)
    world[0].tell()
    assert world[0].wait("got")["equal"]
    assert world.finish() == [0, 0], world[0].errors + world[1].errors


def test_a_send_that_timed_out(worlds: Worlds) -> None:
    world = worlds(
        3,
        """
        world = init()
        world.barrier()
        big = np.zeros(64 << 20, np.uint8)
        if world.rank == 0:
            expect(lambda: world.send(big, 1, timeout=0.3))
            expect(lambda: world.send(np.zeros(1), 1), "later")
            world.send(np.full(1, 5.0), 2)  # the others are not touched by it
            say("sent")
        elif world.rank == 1:
            hear()
            expect(lambda: world.recv(src=0), "receiver")
        else:
            say("got", value=float(world.recv(src=0)[0]))
        world.barrier()
        """,
    )
    event = world[0].wait("raised")
    assert event["type"] == "Timeout"
    assert event["missing"] == [1]
    assert "send(dst=1)" in event["text"]
    assert "no more can be sent to that rank" in event["text"]
    event = world[0].wait("later")
    assert event["type"] == "ChannelClosed"
    assert "cut short" in event["text"]
    assert world[2].wait("got")["value"] == 5.0
    world[0].wait("sent")
    world[1].tell()
    event = world[1].wait("receiver")
    assert event["type"] == "ChannelClosed", event  # rank 0 is not lost
    assert world.finish() == [0, 0, 0], "".join(rank.errors for rank in world)


def test_one_deadline_for_all_steps(worlds: Worlds) -> None:
    # Each step of the ring takes its time, none of them as long as the deadline; all of them together take longer.
    world = worlds(
        4,
        """
        from phalanx.group.engines.steps import run
        original = run._run_step
        def slow(*arguments):
            if world.rank == 3:
                time.sleep(0.4)
            return original(*arguments)
        run._run_step = slow
        world = init(options=px.Options(transport="tcp", algorithm="all_reduce=ring"))
        world.barrier()
        say("enter")
        expect(lambda: world.all_reduce(np.ones(8), timeout=1.2))
        """,
        host="parent",
        env={"PHALANX_PURE": "1"},  # the core runs all steps in one go
    )
    for rank in world:
        event = rank.wait("raised")
        assert event["type"] == "Timeout", event
        assert event["took"] < bound(1.2 + 1.5), event
    assert any("not done within 1.2 s" in rank.wait("raised")["text"] for rank in world)


def test_a_deadline_counts_waiting_for_ones_turn(worlds: Worlds) -> None:
    world = worlds(
        2,
        """
        world = init()
        world.barrier()
        if world.rank == 0:
            thread = threading.Thread(target=lambda: expect(lambda: world.recv(src=1, timeout=1.0), "thread"))
            thread.start()
            works = [world.all_reduce(np.ones(4), async_op=True, timeout=0.5) for _ in range(3)]
            expect(lambda: world.barrier(timeout=0.8))
            for work in works:
                expect(work.wait, "work")
            thread.join()
        else:
            hear()
        """,
    )
    began = time.monotonic()
    assert world[0].wait("raised")["type"] == "Timeout"
    for count in (1, 2, 3):
        assert world[0].wait("work", count=count)["type"] == "Timeout"
    assert time.monotonic() - began < bound(30)
