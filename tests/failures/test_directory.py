"""The directory's process: it depends on nobody, everybody notices its end, and it ends with its job."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from tests.failures.ranks import CONTRACT, DIRECTORY_ENDS, Worlds, directory_of, parent_of, wait_for, worlds  # noqa: F401

BUSY = """
import ctypes
world = init()
world.barrier()
say("formed")
hear()
if world.rank == 0:
    ctypes.PyDLL(None).sleep(6)  # holds the GIL: no other thread of this process runs
    say("awake")
    hear()
expect(lambda: world.all_reduce(np.ones(3)))
"""


def test_a_loss_is_heard_while_rank_0_holds_its_gil(worlds: Worlds) -> None:
    world = worlds(3, BUSY)
    world.wait("formed")
    world[0].tell()
    world[1].tell()
    world[1].wait_asleep()
    killed = world[2].kill()
    event = world[1].wait("raised")
    assert (event["type"], event["peer"]) == ("PeerLost", 2), event
    assert event["at"] - killed < CONTRACT
    assert not world[0].said("awake"), "rank 0 was not busy"


WAITING = """
world = init()
world.barrier()
say("formed")
if world.rank == 0:
    hear()
expect(lambda: world.all_reduce(np.ones(3)))
expect(lambda: world.barrier(), "again")
world.close()
say("closed")
"""


def test_rank_0_is_lost_as_any_other(worlds: Worlds) -> None:
    world = worlds(3, WAITING)
    world.wait("formed")
    for rank in world.but(0):
        rank.wait_asleep()
    killed = world[0].kill()
    for rank in world.but(0):
        event = rank.wait("raised")
        assert (event["type"], event["peer"]) == ("PeerLost", 0), event
        assert event["at"] - killed < CONTRACT
        rank.wait("closed")


def test_the_end_of_the_directory_is_said_by_everybody(worlds: Worlds) -> None:
    world = worlds(3, WAITING)
    world.wait("formed")
    for rank in world.but(0):
        rank.wait_asleep()
    killed = time.monotonic()
    os.kill(directory_of(worlds, world[0]), signal.SIGKILL)
    for rank in (*world.but(0), world[0]):
        if rank is world[0]:  # it is not waiting for the others, which know by now
            rank.tell()
            killed = time.monotonic()
        event = rank.wait("raised")
        assert event["type"] == "RendezvousError", event
        assert "the directory went away" in event["text"]
        assert event["at"] - killed < CONTRACT
        rank.wait("closed")
    assert world.finish() == [0, 0, 0]


def test_it_knows_the_token_by_no_way_that_others_can_read(worlds: Worlds) -> None:
    world = worlds(2, WAITING, env={"PHALANX_TOKEN": "very-secret-token"})
    world.wait("formed")
    process = Path(f"/proc/{directory_of(worlds, world[0])}")
    assert b"very-secret-token" not in (process / "cmdline").read_bytes() + (process / "environ").read_bytes()


def test_it_is_no_child_of_rank_0_and_holds_none_of_its_descriptors(worlds: Worlds) -> None:
    """A program that waits for all of its children would wait for it, and one that reads rank 0's output as well."""
    world = worlds(2, WAITING)
    world.wait("formed")
    hosted = directory_of(worlds, world[0])
    assert parent_of(hosted) != world[0].pid
    assert os.getsid(hosted) != os.getsid(world[0].pid)
    held = {os.readlink(entry) for entry in Path(f"/proc/{hosted}/fd").iterdir()}
    assert os.readlink(f"/proc/{world[0].pid}/fd/1") not in held


@pytest.mark.parametrize("formed", [True, False])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_its_job(worlds: Worlds, formed: bool, number: int) -> None:
    worlds.leaves_file = not formed
    world = worlds(3, WAITING, started=3 if formed else 2)
    if formed:
        world.wait("formed")
    hosted = directory_of(worlds, world[0])
    for rank in world:
        rank.signal(number)
    for rank in world:
        rank.finish()
    wait_for(lambda: not Path(f"/proc/{hosted}").exists(), "the end of the directory", DIRECTORY_ENDS)
