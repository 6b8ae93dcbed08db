"""A rank that is killed: every survivor's operation raises `PeerLost` with its number, within a second, for good."""

from __future__ import annotations

import pytest
from tests.failures.ranks import CONTRACT, HOSTS, Worlds, assert_lost, worlds  # noqa: F401

BLOCKED = """
world = init()
world.barrier()
pair = world.subgroup([world.rank, VICTIM])
big = np.zeros(32 << 20, np.uint8)
small = np.zeros(4, np.float32)
world.barrier()
if world.rank == VICTIM:
    say("ready")
    hear()
say("enter")
expect(lambda: {call})
expect(lambda: world.barrier(), "again")
expect(lambda: world.recv(src=VICTIM), "again")
expect(lambda: world.send(small, (world.rank + 1) % world.world_size), "again")
expect(lambda: world.subgroup([world.rank]), "again")
world.close()
say("closed")
"""

CALLS = {
    "barrier": "world.barrier()",
    "broadcast": "world.broadcast(small, VICTIM)",
    "all_reduce": "world.all_reduce(small)",
    "large all_reduce": "world.all_reduce(big)",
    "recv": "world.recv(src=VICTIM)",
    "recv from anyone": "world.recv()",
    "recv_object": "world.recv_object(VICTIM)",
    "send": "world.send(big, VICTIM)",
    "sendrecv": "world.sendrecv(big, VICTIM, src=VICTIM)",
    "irecv": "world.irecv(src=VICTIM).wait()",
    "isend": "world.isend(big, VICTIM).wait()",
    "asynchronous all_reduce": "world.all_reduce(small, async_op=True).wait()",
    "split": "world.split(0)",
    "raw recv": "world.backend.recv(bytearray(8), VICTIM)",
    "raw send": "world.backend.send(big, VICTIM)",
    "raw barrier": "world.backend.barrier()",
    "sub-group": "pair.barrier()",
}


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("call", CALLS)
def test_blocked_operations_raise_within_a_second(worlds: Worlds, call: str, host: str) -> None:
    # Half of them with the rank that hosts the directory as the victim.
    victim = 0 if host == "rank0" else 2
    world = worlds(3, BLOCKED.replace("{call}", CALLS[call]), host=host, VICTIM=victim)
    survivors = world.but(victim)
    world[victim].wait("ready")
    for rank in survivors:
        rank.wait("enter")
        rank.wait_asleep()
    killed = world[victim].kill()
    for rank in survivors:
        event = rank.wait("raised")
        assert_lost(event, victim, killed)
        assert event["type"] == "PeerLost"
        assert event["rank"] == rank.number
        for again in (1, 2, 3, 4):
            event = rank.wait("again", count=again)
            assert (event["type"], event["peer"]) == ("PeerLost", victim), event
            assert event["took"] < CONTRACT
        rank.wait("closed")
        assert rank.finish() == 0, rank.errors


def test_idle_ranks_raise_at_their_next_call(worlds: Worlds) -> None:
    world = worlds(
        3,
        """
        world = init()
        world.barrier()
        if world.rank == 1:
            say("ready")
            hear()
        while "broken" not in repr(world):  # no call: the group learns of it by itself
            time.sleep(0.005)
        say("broken")
        hear()
        expect(lambda: world.all_reduce(np.ones(3)))
        """,
    )
    world[1].wait("ready")
    killed = world[1].kill()
    for rank in world.but(1):
        assert rank.wait("broken")["at"] - killed < CONTRACT
        rank.tell()
        event = rank.wait("raised")
        assert (event["type"], event["peer"]) == ("PeerLost", 1), event
        assert event["took"] < CONTRACT
        assert rank.finish() == 0, rank.errors


def test_the_first_cause_stays(worlds: Worlds) -> None:
    world = worlds(
        4,
        """
        world = init()
        expect(lambda: world.recv(src=3))
        hear()
        expect(lambda: world.recv(src=2), "again")
        expect(lambda: world.barrier(), "again")
        """,
        host="parent",
    )
    world.wait("joined")
    for victim in (3, 2):
        killed = world[victim].kill()
        for rank in world.but(*range(victim, 4)):
            assert_lost(rank.wait("raised"), 3, killed if victim == 3 else float("inf"))
    world[2].finish()
    for rank in world.but(2, 3):
        rank.tell()
        for count in (1, 2):
            event = rank.wait("again", count=count)
            assert (event["type"], event["peer"]) == ("PeerLost", 3), event


@pytest.mark.parametrize("call", ["world.recv(src=1)", "world.recv()", "world.irecv(src=1).wait()"])
def test_half_a_message_is_no_message(worlds: Worlds, call: str) -> None:
    world = worlds(
        2,
        """
        world = init()
        if world.rank == 1:
            work = world.isend(np.zeros(64 << 20, np.uint8), 0)
            assert not work.done()
            say("sending")
            hear()
        hear()
        say("enter")
        expect(lambda: {call})
        """.replace("{call}", call),
    )
    world[0].wait("joined")
    world[1].wait("sending")
    killed = world[1].kill()
    world[0].tell()
    world[0].wait("enter")
    assert_lost(world[0].wait("raised"), 1, killed)


def test_only_groups_with_the_dead_member_break(worlds: Worlds) -> None:
    world = worlds(
        4,
        """
        world = init()
        half = world.subgroup([0, 1] if world.rank < 2 else [2, 3])
        inner = half.subgroup([0, 1])
        half.barrier()
        world.barrier()
        if world.rank == 3:
            say("ready")
            hear()
        say("enter")
        expect(lambda: world.barrier())
        if world.rank == 2:
            expect(lambda: half.barrier(), "half")
            expect(lambda: inner.barrier(), "half")
        else:
            for _ in range(100):
                x = inner.all_reduce(half.all_reduce(np.ones(1000)))
                half.sendrecv(x, 1 - half.rank, src=1 - half.rank)
            say("went on", value=float(x[0]), broken=repr(world))
            half.close()
        """,
    )
    world[3].wait("ready")
    for rank in world.but(3):
        rank.wait("enter")
        rank.wait_asleep()
    killed = world[3].kill()
    for rank in world.but(3):
        assert_lost(rank.wait("raised"), 3, killed)
    for count in (1, 2):
        assert_lost(world[2].wait("half", count=count), 3, killed)
    for rank in world.but(2, 3):
        event = rank.wait("went on")
        assert event["value"] == 4.0
        assert "broken" in event["broken"]
        assert rank.finish() == 0, rank.errors


def test_a_rank_that_ends_without_a_word_is_lost(worlds: Worlds) -> None:
    world = worlds(
        3,
        """
        world = init()
        world.barrier()
        say("enter")
        if world.rank == 0:
            hear()
            say("leaving")
            os._exit(0)
        expect(lambda: world.barrier())
        """,
    )
    for rank in world.but(0):
        rank.wait("enter")
        rank.wait_asleep()
    world[0].tell()
    since = world[0].wait("leaving")["at"]
    for rank in world.but(0):
        event = rank.wait("raised")
        assert_lost(event, 0, since)
        assert event["type"] == "PeerLost"


def test_a_killed_launcher_ends_all_ranks(worlds: Worlds) -> None:
    world = worlds(2, "world = init()\nexpect(lambda: world.recv(src=1 - world.rank))", host="parent")
    world.wait("joined")
    for rank in world:
        rank.wait_asleep()
    assert world.directory is not None
    # Its thread ends and the kernel closes its connections, as when the process is killed: no word of goodbye.
    world.directory._reactor.call_soon(
        lambda: [entry.link.stream.close() for entry in world.directory._ranks.values()]  # type: ignore[union-attr]
    )
    for rank in world:
        event = rank.wait("raised")
        assert event["type"] == "RendezvousError", event
        assert "directory" in event["text"]


def test_one_that_dies_while_joining_is_missing(worlds: Worlds) -> None:
    script = """
    expect(lambda: init(timeout=3.0))
    """
    world = worlds(3, script, started=3, host="parent")
    # Rank 2 is killed on its way in; the directory forgets it, and the others say who is missing.
    world[2].kill()
    for rank in world.but(2):
        event = rank.wait("raised")
        assert event["type"] == "WorldNotFormed", event
        assert event["missing"] == [2], event
        assert "2" in event["text"]
