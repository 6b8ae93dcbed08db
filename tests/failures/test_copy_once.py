"""What happens to a rank while others read its memory: each of them raises, or has the right data.

A seccomp filter holds one of the readers up in the middle, between two pieces of what it reads.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.failures.ranks import Worlds, assert_lost, wait_for, worlds  # noqa: F401
from tests.failures.system_calls import siblings_can_read

from phalanx import _native

pytestmark = [
    pytest.mark.skipif(not _native.available, reason="the segment needs the core (PHALANX_PURE is set)"),
    pytest.mark.skipif(not siblings_can_read(), reason="this machine lets no process read another's memory"),
]

BEGIN = """
import ctypes, mmap, signal
from system_calls import READ_PEER, hold_up
world = init()
world.barrier()
assert world._engine.segment.reads_peers
n = world.world_size
count = 4 << 20  # from one rank to another: 16 MiB, two pieces
room = mmap.mmap(-1, 4 * n * count, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
x = np.frombuffer(room, np.int32)
x[:] = world.rank
out = np.full(n * count, -1, np.int32)
expected = np.repeat(np.arange(n, dtype=np.int32), count)
def aside(function):
    threading.Thread(target=function, daemon=True).start()
def hold(turn):
    if turn == 2 * (n - 1):  # in the middle of what the last rank has
        say("held")
        hear()
"""


def test_a_rank_that_is_killed(worlds: Worlds) -> None:
    world = worlds(
        3,
        BEGIN
        + """
if world.rank == 0:
    hold_up(READ_PEER, hold)
expect(lambda: world.all_to_all(x, out))
expect(lambda: world.barrier(), "again")
""",
    )
    world[0].wait("held")
    killed = world[2].kill()
    world[2].finish()  # until then its memory can be read
    world[0].tell()
    for rank in world.but(2):
        assert_lost(rank.wait("raised"), 2, killed)
        assert rank.wait("again")["peer"] == 2
        assert rank.finish() == 0, rank.errors


def test_a_rank_that_becomes_another_program(worlds: Worlds) -> None:
    # It keeps the number of its process, and has other memory.
    world = worlds(
        3,
        BEGIN
        + """
if world.rank == 0:
    hold_up(READ_PEER, hold)
if world.rank == 2:
    aside(lambda: hear() and os.execv("/bin/sleep", ["sleep", "60"]))
expect(lambda: world.all_to_all(x, out))
""",
    )
    world[0].wait("held")
    world[2].tell()
    program = Path(f"/proc/{world[2].pid}/comm")
    wait_for(lambda: program.read_text() == "sleep\n", "the other program")
    world[0].tell()
    for rank in world.but(2):
        event = rank.wait("raised")
        assert ("PeerLost" in event["kinds"], event["peer"]) == (True, 2), event
        assert rank.finish() == 0, rank.errors
    world[2].kill()


def test_memory_that_is_unmapped_meanwhile(worlds: Worlds) -> None:
    # It ends who does that to its own array; the one that reads it goes on.
    world = worlds(
        2,
        BEGIN
        + """
def unmap():
    hear()
    assert ctypes.CDLL(None).munmap(ctypes.c_void_p(x.ctypes.data), ctypes.c_size_t(4 * count)) == 0
    say("unmapped")
if world.rank == 0:
    hold_up(READ_PEER, hold)
else:
    aside(unmap)
expect(lambda: world.scatter(x if world.rank == 1 else None, 1, out[:count]))
""",
    )
    world[0].wait("held")
    world[1].tell()
    world[1].wait("unmapped")
    world[0].tell()
    event = world[0].wait("raised")
    assert ("PeerLost" in event["kinds"], event["peer"]) == (True, 1), event
    assert world.finish() == [0, -signal.SIGSEGV], world[0].errors


@pytest.mark.parametrize("why", ["time is over", "interrupt"])
def test_whoever_gives_up_may_change_its_array(worlds: Worlds, why: str) -> None:
    # The one that still reads it does not succeed with what it finds.
    world = worlds(
        3,
        BEGIN
        + """
if world.rank == 0:
    hold_up(READ_PEER, hold)
expect(lambda: world.all_to_all(x, out, timeout=60 if world.rank < 2 else LIMIT))
x[:] = -2
say("changed")
""",
        LIMIT=60.0 if why == "interrupt" else 3.0,
    )
    world[0].wait("held")
    if why == "interrupt":
        world[2].wait_asleep()
        world[2].signal(signal.SIGINT)
    event = world[2].wait("raised")
    assert ("KeyboardInterrupt" if why == "interrupt" else "Timeout") in event["kinds"], event
    world[2].wait("changed")
    world[0].tell()
    for rank in world.but(2):
        event = rank.wait("raised")
        assert "PhalanxError" in event["kinds"], event
    world.finish()


def test_an_abort(worlds: Worlds) -> None:
    world = worlds(
        2,
        BEGIN
        + """
if world.rank == 0:
    hold_up(READ_PEER, lambda turn: world.abort("enough") if turn == 1 else None)
expect(lambda: world.all_to_all(x, out))
""",
    )
    for rank in world:
        event = rank.wait("raised")
        assert "PhalanxError" in event["kinds"], event
        assert "enough" in event["text"], event
    world.finish()


def test_an_interrupt(worlds: Worlds) -> None:
    # All have come by then: the operation ends well, and the signal counts after it.
    world = worlds(
        2,
        BEGIN
        + """
if world.rank == 0:
    hold_up(READ_PEER, hold)
expect(lambda: np.array_equal(world.all_to_all(x, out), expected))
""",
    )
    world[0].wait("held")
    world[1].wait_asleep()
    world[0].signal(signal.SIGINT)
    world[0].tell()
    assert world[0].wait("raised")["type"] == "KeyboardInterrupt"
    assert world[1].wait("raised")["text"] == "returned True"
    world.finish()


def test_a_rank_that_stops_for_a_while(worlds: Worlds) -> None:
    # Its memory can be read meanwhile. The others wait for it, and all have the right data.
    world = worlds(
        3,
        BEGIN
        + """
if world.rank != 1:
    hold_up(READ_PEER, hold)
world.all_to_all(x, out)
x[:] = -2
say("done", right=bool(np.array_equal(out, expected)))
""",
    )
    world[0].wait("held")
    world[2].wait("held")
    world[2].stop()
    world[0].tell()
    world[0].wait_asleep()
    assert not world[0].said("done")
    world[2].signal(signal.SIGCONT)
    world[2].tell()
    for rank in world:
        assert rank.wait("done")["right"]
    assert world.finish() == [0, 0, 0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a namespace of processes")
def test_ranks_that_number_processes_differently(worlds: Worlds) -> None:
    world = worlds(
        2,
        """
        import ctypes
        if os.environ["RANK"] == "1":
            new_pids = 0x20000000
            if ctypes.CDLL(None).unshare(new_pids) != 0:
                say("done", right=None)
                sys.exit(0)
            if child := os.fork():
                sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        world = init()
        everything = world.all_gather(np.full(1 << 20, world.rank, np.int32))
        say("done", right=bool(np.array_equal(everything, np.repeat(np.arange(2, dtype=np.int32), 1 << 20))))
        """,
    )
    if world[1].wait("done")["right"] is None:
        world[0].kill()
        pytest.skip("no namespaces of processes here")
    assert [rank.wait("done")["right"] for rank in world] == [True, True]
    assert world.finish() == [0, 0]
