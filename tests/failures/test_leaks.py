"""What is left after a world, a group or a program has ended: nothing."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.failures.ranks import HOSTS, Worlds, worlds  # noqa: F401

import phalanx as px
from phalanx import _native
from phalanx.slate import files
from phalanx.testing import run_ranks

COUNT = """
import gc
import phalanx.slate.files
def listening():
    mine = set(open_files())
    found = 0
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in open(table).read().splitlines()[1:]:
            words = line.split()
            found += words[3] == "0A" and f"socket:[{words[9]}]" in mine
    return found
fewest = threads()
def count():
    gc.collect()
    return {
        "descriptors": descriptors(),
        "threads": threads(fewest),
        "listening": listening(),
        "files": sorted(os.listdir(os.environ["XDG_RUNTIME_DIR"])),
        # Tests on MPI, and jobs with slates, may run beside this one.
        "memory": sorted(
            name for name in os.listdir("/dev/shm") if not name.startswith(("mpich_shm_", "sm_segment.", "phalanx-"))
        ),
        "slates": [file.path.name for file in phalanx.slate.files.listed() if file.pid == os.getpid()],
    }
"""


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Checks that nothing was left, but for wakers: a thread keeps one, and one for a wait inside another."""
    wakers = "anon_inode:[eventfd]"
    assert after["descriptors"].count(wakers) <= 2
    for counts in (before, after):
        counts["descriptors"] = [name for name in counts["descriptors"] if name != wakers]
    assert after == before


@pytest.mark.parametrize("host", HOSTS)
def test_thirty_worlds_leave_nothing(worlds: Worlds, host: str) -> None:
    world = worlds(
        2,
        COUNT
        + """
def once(number):
    with px.init(timeout=30) as world:
        world.all_reduce(np.ones(3))
        half = world.subgroup([0, 1])
        half.barrier()
        work = world.irecv(src=1 - world.rank, tag=5)
        world.isend(np.ones(10), 1 - world.rank, tag=5).wait()
        work.wait()
        world.all_reduce(np.ones(3), async_op=True).wait()
        if number % 3 == 0:
            half.close()
before = count()
for number in range(30):
    once(number)
after = count()
say("counted", before=before, after=after)
""",
        host=host,
    )
    for rank in world:
        event = rank.wait("counted", limit=110)
        event["before"]["files"] = []  # a faster rank 0 may have written its own by then
        assert_same(event["before"], event["after"])
    assert world.finish() == [0, 0], world[0].errors + world[1].errors


GROUPS = (
    COUNT
    + """
world = init()
def once(number):
    group = world.subgroup([0, 1])
    if number % 50 == 0:
        group.irecv(src=1 - group.rank, tag=5)
        group.isend(np.ones(10), 1 - group.rank, tag=5).wait()
    group.all_reduce(np.ones(3))
    group.barrier()
    if number % 2:
        group.close()
for number in range(20):
    once(number)
world.barrier()
gc.collect()
# Threads of those groups may still be on their way out.
fewest = min(threads() for _ in range(100) if time.sleep(0.002) is None)
before = count()
world.barrier()  # nobody goes on, and opens new channels, while others still count
for number in range(TIMES):
    once(number)
gc.collect()
world.barrier()
after = count()
world.barrier()
state = len(world._control._watchers), len(world.backend.world._lanes), len(world.backend.world._parked)
say("counted", before=before, after=after, state=state)
world.close()
"""
)


def check_groups(worlds: Worlds, times: int, limit: float) -> None:
    world = worlds(2, GROUPS, TIMES=times, host="parent")
    for rank in world:
        event = rank.wait("counted", limit=limit)
        assert_same(event["before"], event["after"])
        assert event["state"][0] <= 2
        assert event["state"][1] <= 3
        assert event["state"][2] == 0
    assert world.finish() == [0, 0], world[0].errors + world[1].errors


def test_three_hundred_sub_groups_leave_nothing(worlds: Worlds) -> None:
    check_groups(worlds, 300, 100)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_thousand_sub_groups_leave_nothing(worlds: Worlds) -> None:
    check_groups(worlds, 10_000, 800)


@pytest.mark.parametrize(
    ("host", "where", "after"),
    [
        ("rank0", "module", "nothing"),
        ("rank0", "function", "pending"),
        ("parent", "module", "pending"),
        ("parent", "function", "nothing"),
    ],
)
def test_a_program_that_ends_without_close(worlds: Worlds, host: str, where: str, after: str) -> None:
    body = """
world = init()
world.barrier()
world.send(np.full(3, 2.0), 1 - world.rank, tag=1)
half = world.subgroup([0, 1])
half.barrier()
"""
    if after == "pending":
        # Nobody will ever send this: the threads that wait for it must not keep the program alive.
        body += "work = world.irecv(src=1 - world.rank, tag=9)\n"
        body += "late = half.all_reduce(np.ones(2), async_op=True) if world.rank == 0 else None\n"
    body += "say('got', value=float(world.recv(src=1 - world.rank, tag=1)[0]))\n"
    if where == "function":
        body = "def main():\n" + "".join(f"    {line}\n" for line in body.splitlines()) + "main()\n"
    world = worlds(2, body, host=host)
    for rank in world:
        assert rank.wait("got")["value"] == 2.0
    for rank in world:
        assert rank.finish(10.0) == 0, rank.errors
        assert rank.errors == ""
    pids = {rank.pid for rank in world}
    assert not [file for file in files.listed() if file.pid in pids]


def test_collected_groups_give_back_their_channels(worlds: Worlds) -> None:
    world = worlds(
        2,
        COUNT
        + """
import phalanx.rendezvous.lifeline
phalanx.rendezvous.lifeline.AFTER = 3600.0  # else one may just be made when descriptors are counted
world = init()
world.barrier()
fewest = threads()
before = count()
world.barrier()  # nobody goes on, and opens new channels, while others still count
groups = [world.subgroup([0, 1]) for _ in range(10)]
for group in groups:
    group.barrier()
    group.send(np.ones(1), 1 - group.rank)
    group.recv(src=1 - group.rank)
world.barrier()
most = count()
world.barrier()
del groups, group
gc.collect()
world.barrier()
after = count()
world.barrier()
say("counted", before=before, most=most, after=after)
""",
    )
    for rank in world:
        event = rank.wait("counted")
        assert_same(event["before"], event["after"])
        assert len(event["most"]["descriptors"]) >= len(event["before"]["descriptors"]) + 40
    assert world.finish() == [0, 0], world[0].errors + world[1].errors


def test_no_private_file_outlives_the_forming_of_a_world(worlds: Worlds) -> None:
    world = worlds(
        2,
        """
        world = init()
        world.barrier()
        say("files", names=os.listdir(os.environ["XDG_RUNTIME_DIR"]))
        hear()
        """,
    )
    for rank in world:
        assert rank.wait("files")["names"] == []
    # Not even a rank 0 that is killed now can leave one.
    world[0].kill()
    world[1].tell()
    world.finish()
    assert list(worlds.runtime.iterdir()) == []


def close_without_a_collector(group: px.Group) -> list[int]:
    def segments() -> int:
        return sum("phalanx" in line for line in Path("/proc/self/maps").read_text().splitlines())

    gc.collect()
    gc.disable()
    found = [segments()]
    for _ in range(5):
        with group.subgroup(range(2)) as sub:
            sub.all_reduce(np.ones(100))
            for _ in range(5):  # they go over to rings
                sub.sendrecv(np.zeros(1000), 1 - sub.rank, src=1 - sub.rank)
        del sub
        found.append(segments())
    return found


@pytest.mark.skipif(not _native.available, reason="ranks share memory only with the core")
def test_a_closed_group_gives_its_memory_back_without_the_garbage_collector() -> None:
    for found in run_ranks(2, close_without_a_collector, backend="mesh"):
        assert max(found[1:]) <= found[1], found
