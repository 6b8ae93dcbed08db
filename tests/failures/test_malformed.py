"""Bytes that are no frame, on a channel that was opened properly: it is closed, and nothing is allocated."""

from __future__ import annotations

from tests.failures.ranks import CONTRACT, Worlds, assert_lost, worlds  # noqa: F401
from tests.lateness import bound

INPUTS = {
    "junk": "b'junk' * 100",
    "zeros": "bytes(64)",
    "an unknown kind": "frame(kind=99)",
    "a huge payload": "frame(payload=1 << 60)",
    "a huge description": "frame(description=0xFFFF_FFFF)",
    "a description that is none": "frame(kind=2, description=8, payload=8) + b'\\xff' * 16",
    "an array of another size": "frame(kind=2, description=len(ARRAY), payload=8) + ARRAY + b'\\xff' * 8",
    "an object that is none": "frame(kind=3, description=8, payload=0) + b'\\xc1' * 8",
}

SCRIPT = """
import resource, struct
from phalanx.group.data.arrays import Description
ARRAY = Description("<f8", [1 << 40], "numpy").pack()
def frame(kind=2, description=0, tag=0, payload=0):
    return struct.pack("<2sBBIQQ", b"PX", kind, 0, description, tag, payload)
def memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
import phalanx as px
world = init(options=px.Options(transport="tcp"))
world.barrier()
"""


def test_a_message_that_is_none(worlds: Worlds) -> None:
    world = worlds(
        3,
        SCRIPT
        + """
for name, data in INPUTS.items():
    group = world.subgroup([0, 1, 2])
    group.barrier()
    if world.rank == 0:
        group.send(np.zeros(1), 1)
        world.recv(src=1)
        group._messages._outbound[1].stream._socket.send(eval(data))
        world.send(np.zeros(1), 1)
    elif world.rank == 1:
        group.recv(src=0)
        before = memory()
        world.send(np.zeros(1), 0)
        world.recv(src=0)
        receive = group.recv_object if "object" in name else group.recv
        expect(lambda: receive(src=0), name)
        expect(lambda: receive(src=0, timeout=0.1), name + ", again")
        say(name + ", memory", more=memory() - before)
        expect(lambda: group.send(np.zeros(1), 0), name + ", back")
        group.send(np.zeros(1), 2)
    if world.rank == 0:
        expect(lambda: group.recv(src=1), name + ", back")
    elif world.rank == 2:
        group.recv(src=1)
    group.barrier()
    group.close()
say("went on")
""",
        INPUTS=INPUTS,
    )
    world.wait("went on")
    for name in INPUTS:
        event = world[1].wait(name)
        assert event["type"] == "ProtocolError", (name, event)
        assert event["peer"] == 0
        assert "rank 0" in event["text"]
        event = world[1].wait(f"{name}, again")
        # The rest of a connection that carried nonsense cannot be trusted; a frame that was whole leaves it usable.
        assert event["type"] in ("ProtocolError", "Timeout"), (name, event)
        closed = event["type"] == "ProtocolError"
        for rank in (world[0], world[1]):  # the other direction is the same connection
            event = rank.wait(f"{name}, back")
            assert event["type"] == ("ChannelClosed" if closed else ""), (name, event)
            assert event["took"] < bound(3.0)
        assert world[1].wait(f"{name}, memory")["more"] < 32
    assert world.finish() == [0, 0, 0], "".join(rank.errors for rank in world)


def test_nonsense_in_a_collective_breaks_the_group_for_all(worlds: Worlds) -> None:
    world = worlds(
        3,
        SCRIPT
        + """
for name in ("junk", "a huge payload"):
    group = world.subgroup([0, 1, 2])
    group.all_reduce(np.ones(3))
    world.barrier()
    if world.rank == 0:
        group._collectives._outbound[1].stream._socket.send(eval(INPUTS[name]))
        world.recv(src=1)
    # A rank that has all it needs may finish the first of them before it hears of the end; none finishes the second.
    expect(lambda: [group.all_reduce(np.ones(3)) for _ in range(2)], name)
    if world.rank == 1:
        world.send(np.ones(1), 0)
    group.close()
    world.barrier()
""",
        INPUTS=INPUTS,
    )
    for name in ("junk", "a huge payload"):
        event = world[1].wait(name)
        assert event["type"] == "ProtocolError", event
        assert event["peer"] == 0
        for rank in world.but(1):
            event = rank.wait(name)
            assert "PhalanxError" in event["kinds"], event
            assert event["took"] < bound(3.0)
            assert "on rank 1: ProtocolError" in event["text"], event
    assert world.finish() == [0, 0, 0], "".join(rank.errors for rank in world)


def test_nonsense_on_a_control_connection(worlds: Worlds) -> None:
    world = worlds(
        3,
        """
        world = init()
        world.barrier()
        if world.rank == 1:
            hear()
            say("writing")
            world.backend.world._client.link.stream._socket.send(b"\\xff" * 64)
        expect(lambda: world.barrier() if world.rank != 1 else world.recv(src=0))
        """,
        host="parent",
    )
    world.wait("joined")
    for rank in world.but(1):
        rank.wait_asleep()
    world[1].tell()
    since = world[1].wait("writing")["at"]
    for rank in world.but(1):
        event = rank.wait("raised")
        assert_lost(event, 1, since)
        assert "control message" in event["text"], event
    assert world[1].wait("raised")["at"] - since < bound(CONTRACT)
