"""A rank that is killed: every survivor's operation raises `PeerLost` with its number, within a second, for good."""

from __future__ import annotations

import pytest
from tests.failures.ranks import CONTRACT, HOSTS, Worlds, assert_lost, worlds  # noqa: F401
from tests.lateness import bound

ALL_AT_ONCE = """
world = init()
everyone = range(world.world_size)
big = np.zeros(16 << 20, np.uint8)
small = np.zeros(4, np.float32)
calls = {
    "barrier": lambda g: g.barrier(),
    "broadcast": lambda g: g.broadcast(small, VICTIM),
    "all_reduce": lambda g: g.all_reduce(small),
    "large all_reduce": lambda g: g.all_reduce(big),
    "recv": lambda g: g.recv(src=VICTIM),
    "recv from anyone": lambda g: g.recv(),
    "recv_object": lambda g: g.recv_object(VICTIM),
    "send": lambda g: g.send(big, VICTIM),
    "sendrecv": lambda g: g.sendrecv(big, VICTIM, src=VICTIM),
    "irecv": lambda g: g.irecv(src=VICTIM).wait(),
    "irecv from anyone": lambda g: g.irecv().wait(),
    "isend": lambda g: g.isend(big, VICTIM).wait(),
    "asynchronous all_reduce": lambda g: g.all_reduce(small, async_op=True).wait(),
    "split": lambda g: g.split(0),
    "raw recv": lambda g: g.backend.recv(bytearray(8), VICTIM),
    "raw send": lambda g: g.backend.send(big, VICTIM),
    "raw barrier": lambda g: g.backend.barrier(),
    "inner group": lambda g: g.subgroup([world.rank, VICTIM]).barrier(),
}
groups = {name: world.subgroup(everyone) for name in calls}
world.barrier()
if world.rank == VICTIM:
    say("ready")
    hear()
def run(name):
    say("enter", name=name, thread=threading.get_native_id())
    expect(lambda: calls[name](groups[name]), name)
    expect(lambda: groups[name].barrier(), name + ", again")
threads = [threading.Thread(target=run, args=(name,)) for name in calls]
for thread in threads:
    thread.start()
expect(lambda: world.recv(src=VICTIM))
for thread in threads:
    thread.join()
expect(lambda: world.subgroup([world.rank]), "again")
world.close()
say("closed", calls=list(calls))
"""


@pytest.mark.parametrize(("host", "victim"), [("rank0", 0), ("rank0", 1), ("parent", 2)], ids=str)
def test_all_blocked_operations_raise_within_a_second(worlds: Worlds, host: str, victim: int) -> None:
    # Every operation in a thread of its own, on a group of its own.
    world = worlds(3, ALL_AT_ONCE, host=host, VICTIM=victim)
    world[victim].wait("ready")
    survivors = world.but(victim)
    for rank in survivors:
        for count in range(1, 19):
            rank.wait_asleep(rank.wait("enter", count=count)["thread"])
        rank.wait_asleep()
    killed = world[victim].kill()
    for rank in survivors:
        calls = rank.wait("closed")["calls"]
        assert len(calls) == 18
        for name in ["raised", *calls]:
            event = rank.wait(name)
            assert_lost(event, victim, killed)
            assert (event["type"], event["rank"]) == ("PeerLost", rank.number), (name, event)
        for name in ["again", *(f"{call}, again" for call in calls)]:
            event = rank.wait(name)
            assert (event["type"], event["peer"]) == ("PeerLost", victim), (name, event)
            assert event["took"] < bound(CONTRACT), (name, event)
        assert rank.finish() == 0, rank.errors


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("call", ["barrier()", "recv(src=VICTIM)", "send(np.zeros(32 << 20, np.uint8), VICTIM)"])
def test_a_blocked_operation_raises_within_a_second(worlds: Worlds, call: str, host: str) -> None:
    # Half of them with the rank that hosts the directory as the victim.
    victim = 0 if host == "rank0" else 2
    world = worlds(
        3,
        """
        world = init()
        world.barrier()
        if world.rank == VICTIM:
            say("ready")
            hear()
        say("enter")
        expect(lambda: world.{call})
        expect(lambda: world.barrier(), "again")
        """.replace("{call}", call),
        host=host,
        VICTIM=victim,
    )
    world[victim].wait("ready")
    for rank in world.but(victim):
        rank.wait("enter")
        rank.wait_asleep()
    killed = world[victim].kill()
    for rank in world.but(victim):
        event = rank.wait("raised")
        assert_lost(event, victim, killed)
        assert (event["type"], event["rank"]) == ("PeerLost", rank.number), event
        event = rank.wait("again")
        assert (event["type"], event["peer"]) == ("PeerLost", victim), event
        assert event["took"] < bound(CONTRACT)
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
        assert rank.wait("broken")["at"] - killed < bound(CONTRACT)
        rank.tell()
        event = rank.wait("raised")
        assert (event["type"], event["peer"]) == ("PeerLost", 1), event
        assert event["took"] < bound(CONTRACT)
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


@pytest.mark.parametrize("call", ["world.recv(src=1)", "world.irecv().wait()"])
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
    directory = world.directory
    assert directory is not None

    def vanish() -> None:
        # The kernel closes its connections, as when the process is killed: no word of goodbye.
        for entry in directory._ranks.values():
            entry.link.stream.close()

    directory._reactor.call_soon(vanish)
    for rank in world:
        event = rank.wait("raised")
        assert event["type"] == "RendezvousError", event
        assert "directory" in event["text"]


def test_one_that_dies_while_joining_is_missing(worlds: Worlds) -> None:
    world = worlds(3, "say('joining')\nexpect(lambda: init(timeout=3.0))", host="parent")
    # Rank 2 is killed on its way in; the directory forgets it, and the others say who is missing.
    world[2].wait("joining")
    world[2].kill()
    for rank in world.but(2):
        event = rank.wait("raised")
        assert event["type"] == "WorldNotFormed", event
        assert event["missing"] == [2], event
        assert "rank 2" in event["text"]


def test_a_rank_0_that_dies_before_all_have_joined_is_missing(worlds: Worlds) -> None:
    world = worlds(
        4,
        """
        from phalanx.rendezvous.control import ControlClient
        join = ControlClient.join
        def reached(*arguments):
            say("reached")
            return join(*arguments)
        ControlClient.join = reached
        expect(lambda: init(timeout=30.0))
        """,
        started=3,
    )
    world.wait("reached")
    killed = world[0].kill()
    worlds.leaves_file = True
    for rank in world.but(0):
        event = rank.wait("raised")
        assert event["type"] == "WorldNotFormed", event
        assert 0 in event["missing"], event
        assert "rank 0" in event["text"], event
        assert event["at"] - killed < bound(CONTRACT)
