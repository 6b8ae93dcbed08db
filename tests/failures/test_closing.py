"""Ranks that close on purpose: what was sent before still arrives, what waits for more raises `ChannelClosed`."""

from __future__ import annotations

import pytest
from tests.failures.ranks import CONTRACT, HOSTS, Worlds, assert_lost, wait_for, worlds  # noqa: F401
from tests.lateness import bound


@pytest.mark.parametrize("host", HOSTS)
def test_messages_arrive_after_their_sender_has_left(worlds: Worlds, host: str) -> None:
    world = worlds(
        3,
        """
        world = init()
        world.barrier()
        if world.rank == 2:
            for number in range(50):
                world.send(np.full(100, number), 0)
            world.send_object({"last": "words"}, 0, tag=1)
            world.close()
        else:
            hear()
            if world.rank == 0:
                got = [int(world.recv(src=2)[0]) for _ in range(50)]
                say("got", values=got, words=world.recv_object(2, tag=1)["last"])
                expect(lambda: world.recv(src=2))
                expect(lambda: world.send(np.zeros(1), 2))
            for number in range(100):
                world.sendrecv(np.full(5, number), 1 - world.rank, src=1 - world.rank)
            say("went on")
            hear()  # the first barrier that fails breaks the group for both
            expect(lambda: world.barrier(), "barrier")
            expect(lambda: world.barrier(), "barrier")
            world.close()
        """,
        host=host,
    )
    assert world[2].finish() == 0, world[2].errors
    for rank in world.but(2):
        rank.tell()
    event = world[0].wait("got")
    assert (event["values"], event["words"]) == (list(range(50)), "words")
    for count in (1, 2):
        event = world[0].wait("raised", count=count)
        assert (event["type"], event["peer"]) == ("ChannelClosed", 2), event
        assert event["took"] < bound(CONTRACT)
    for rank in world.but(2):
        rank.wait("went on")
    for rank in world.but(2):  # rank 0 ends after rank 1: it hosts the directory
        rank.tell()
    for rank in world.but(2):
        for count in (1, 2):
            event = rank.wait("barrier", count=count)
            assert (event["type"], event["peer"]) == ("ChannelClosed", 2), event
            assert event["took"] < bound(CONTRACT), event
        assert rank.finish() == 0, rank.errors


def test_close_waits_until_large_messages_are_on_their_way(worlds: Worlds) -> None:
    world = worlds(
        2,
        """
        world = init()
        big = np.arange(8 << 20, dtype=np.uint32)
        if world.rank == 1:
            works = [world.isend(big, 0, tag=tag) for tag in range(2)]
            say("closing")
            world.close()
            say("closed", done=[work.done() for work in works])
        else:
            hear()
            say("got", equal=[bool((world.recv(src=1, tag=tag) == big).all()) for tag in range(2)])
        """,
    )
    world[1].wait("closing")
    world[1].wait_asleep()
    assert not world[1].said("closed")
    world[0].wait("joined")
    world[0].tell()
    assert world[0].wait("got")["equal"] == [True, True]
    assert world[1].wait("closed")["done"] == [True, True]
    assert world.finish() == [0, 0], world[0].errors + world[1].errors


@pytest.mark.parametrize("call", ["recv(src=1, tag=3)", "recv()", "irecv(src=1).wait()", "barrier()"])
def test_a_blocked_operation_ends_when_its_peer_leaves(worlds: Worlds, call: str) -> None:
    world = worlds(
        2,
        """
        world = init()
        if world.rank == 1:
            hear()
            say("closing")
            world.close()
        else:
            say("enter")
            expect(lambda: world.{call})
        """.replace("{call}", call),
    )
    world[0].wait("enter")
    world[0].wait_asleep()
    world[1].wait("joined")
    world[1].tell()
    since = world[1].wait("closing")["at"]
    event = world[0].wait("raised")
    assert_lost(event, 1, since)
    assert event["type"] == "ChannelClosed"
    assert world.finish() == [0, 0], world[0].errors + world[1].errors


def test_a_receive_from_anyone_waits_for_those_who_are_left(worlds: Worlds) -> None:
    world = worlds(
        3,
        """
        world = init()
        if world.rank == 2:
            world.close()
        elif world.rank == 1:
            hear()
            world.send(np.full(1, 7.0), 0)
        else:
            hear()
            say("enter")
            received = world.recv()
            say("got", src=received.src)
            expect(lambda: world.recv())
        """,
    )
    world[2].finish()
    world[0].tell()
    world[0].wait("enter")
    world[0].wait_asleep()
    world[1].tell()
    assert world[0].wait("got")["src"] == 1
    event = world[0].wait("raised")
    assert event["type"] == "ChannelClosed", event
    assert event["took"] < bound(10), "nobody is left who could send anything"


@pytest.mark.parametrize("how", ["half.close()", "del half; gc.collect()"])
def test_one_member_closes_a_sub_group(worlds: Worlds, how: str) -> None:
    world = worlds(
        3,
        """
        import gc
        world = init()
        half = world.subgroup([0, 1]) if world.rank < 2 else None
        if world.rank == 1:
            half.barrier()
            half.send(np.full(1, 3.0), 0)
            {how}
            say("closed")
        elif world.rank == 0:
            half.barrier()
            hear()
            say("got", value=float(half.recv(src=1)[0]))
            expect(lambda: half.recv(src=1))
            expect(lambda: half.send(np.zeros(1), 1))
            expect(lambda: half.barrier())
        world.barrier()
        say("went on")
        """.replace("{how}", how),
    )
    world[1].wait("closed")
    world[0].tell()
    assert world[0].wait("got")["value"] == 3.0
    for count in (1, 2, 3):
        event = world[0].wait("raised", count=count)
        assert (event["type"], event["peer"]) == ("ChannelClosed", 1), event
        assert event["took"] < bound(CONTRACT)
    assert world.finish() == [0, 0, 0], "".join(rank.errors for rank in world)
    world.wait("went on")


def test_rank_0_waits_for_the_others_before_it_takes_the_directory_away(worlds: Worlds) -> None:
    world = worlds(
        4,
        """
        world = init()
        world.barrier()
        if world.rank == 0:
            say("closing")
            world.close()
            say("closed")
        else:
            hear()
            if world.rank < 3:
                for number in range(10):
                    world.sendrecv(np.full(5, number), 3 - world.rank, src=3 - world.rank)
                say("enter")
                expect(lambda: world.recv(src=3))
        """,
    )
    world[0].wait("closing")
    world[0].wait_asleep()
    for rank in (world[1], world[2]):
        rank.tell()
    for rank in (world[1], world[2]):
        rank.wait("enter")
        rank.wait_asleep()
    assert not world[0].said("closed")
    # The directory still watches: a loss is noticed as before.
    killed = world[3].kill()
    for rank in (world[1], world[2]):
        event = rank.wait("raised")
        assert_lost(event, 3, killed)
        assert event["type"] == "PeerLost"
        assert rank.finish() == 0, rank.errors
    world[0].wait("closed")
    assert world[0].finish() == 0, world[0].errors


def test_rank_0_waits_no_longer_than_its_timeout(worlds: Worlds) -> None:
    world = worlds(
        3,
        """
        world = init(timeout=2.0)
        world.barrier()
        if world.rank == 0:
            began = time.monotonic()
            world.close()
            say("closed", took=time.monotonic() - began)
        else:
            hear()
            for number in range(10):
                world.sendrecv(np.full(5, number), 3 - world.rank, src=3 - world.rank)
            say("went on")
            expect(lambda: world.recv(src=0))
        """,
    )
    assert 1.5 < world[0].wait("closed")["took"] < bound(2.0 + 5.0)
    assert world[0].finish() == 0, world[0].errors
    for rank in world.but(0):
        rank.tell()
    for rank in world.but(0):
        rank.wait("went on")
        event = rank.wait("raised")
        assert (event["type"], event["peer"]) == ("ChannelClosed", 0), event
        assert rank.finish() == 0, rank.errors


def test_use_after_close(worlds: Worlds) -> None:
    world = worlds(
        2,
        """
        world = init()
        half = world.subgroup([0, 1])
        blocked = threading.Thread(target=lambda: expect(lambda: world.recv(src=1 - world.rank), "blocked"))
        blocked.start()
        world.barrier()
        time.sleep(0.1)
        world.close()
        world.close()
        blocked.join()
        for call in (
            lambda: world.barrier(),
            lambda: world.send(np.zeros(1), 1 - world.rank),
            lambda: world.recv(),
            lambda: world.subgroup([world.rank]),
            lambda: world.abort("no"),
            lambda: world.backend.send(b"x", 1 - world.rank),
            lambda: half.barrier(),
        ):
            expect(call)
        half.close()
        say("threads", left=[t.name for t in threading.enumerate()])
        """,
    )
    for rank in world:
        assert "ChannelClosed" in rank.wait("blocked")["kinds"]
        for count in range(1, 8):
            event = rank.wait("raised", count=count)
            assert event["type"] in ("Closed", "ChannelClosed"), event
            assert event["took"] < bound(CONTRACT)
        assert rank.wait("threads")["left"] == ["MainThread"]
    assert world.finish() == [0, 0], world[0].errors + world[1].errors
