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
