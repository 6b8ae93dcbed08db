"""A rank that begins to die is lost at once, also while the kernel still holds its other connections open."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.rendezvous.support import TOKEN, Job, Stranger, directory, eventually, ranks

from phalanx._native import core
from phalanx.backends import MeshBackend
from phalanx.errors import PeerLost
from phalanx.rendezvous import lifeline
from phalanx.rendezvous.directory import Directory
from phalanx.wire.handshake import HandshakeStatus, Hello, Rejected, Role

SIZE = 3
HOLDER = """
import os, socket, sys
from phalanx._native import core
connection = socket.socket(fileno=int(sys.argv[1]))
number = os.fstat(connection.fileno()).st_ino
held = core.Lifeline(connection.fileno())
connection.close()
for thread in os.listdir("/proc/self/task"):
    links = [os.readlink(f"/proc/self/task/{thread}/fd/{fd}") for fd in os.listdir(f"/proc/self/task/{thread}/fd")
             if os.path.lexists(f"/proc/self/task/{thread}/fd/{fd}")]
    print(len(links) if thread != str(os.getpid()) else "main", f"socket:[{number}]" in links)
sys.stdout.flush()
if sys.stdin.readline() == "leave\\n":
    held.let_go()
    held.let_go()
    print("left", flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def world() -> Iterator[tuple[Directory, list[MeshBackend]]]:
    with directory(SIZE) as hosted, ranks() as group:
        for rank in range(SIZE):
            group.start(Job(SIZE, directory=hosted.address).launch(rank))
        yield hosted, group.world()


@pytest.fixture
def none_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks are too soon done for lifelines: those of the test are the only ones."""
    monkeypatch.setattr(lifeline, "AFTER", 3600.0)


def line_of(rank: int, hosted: Directory) -> Stranger:
    stranger = Stranger(hosted.address)
    try:
        stranger.shake(Hello(Role.LIFELINE, rank, SIZE), TOKEN)
    except BaseException:
        stranger.close()
        raise
    return stranger


@pytest.mark.usefixtures("none_of_their_own")
def test_the_end_of_a_lifeline_is_the_loss_of_its_rank() -> None:
    with world() as (hosted, backends):
        line_of(1, hosted).close()
        for backend in (backends[0], backends[2]):
            with pytest.raises(PeerLost, match=r"rank 1 is lost: its process has ended \(process \d+ on ") as caught:
                backend.recv(bytearray(8), 1, timeout=30)
            assert caught.value.peer == 1


@pytest.mark.usefixtures("none_of_their_own")
def test_after_a_goodbye_the_rank_is_still_there() -> None:
    with world() as (hosted, backends):
        line = line_of(1, hosted)
        line.send(b"\0")
        line.close()
        eventually(lambda: not hosted._lifelines._streams, "the lifeline to be dropped", 10)
        backends[1].send(b"still here", 0, timeout=30)
        backends[0].recv(bytearray(10), 1, timeout=30)
        assert not backends[0].world.has_lost_ranks


@pytest.mark.usefixtures("none_of_their_own")
def test_only_a_rank_of_the_world_has_a_lifeline() -> None:
    with world() as (hosted, _), pytest.raises(Rejected) as caught:
        line_of(SIZE, hosted)
    assert caught.value.status is HandshakeStatus.CLOSED


@pytest.mark.skipif(core is None, reason="there is no core")
def test_a_world_that_lasts_has_lifelines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifeline, "AFTER", 0.0)
    with world() as (hosted, backends):
        eventually(lambda: len(hosted._lifelines._streams) == SIZE, "all lifelines", 30)
        eventually(lambda: all(backend.world._lifeline._held for backend in backends), "them to be held", 30)
        backends[0].close()
        eventually(lambda: len(hosted._lifelines._streams) == SIZE - 1, "a goodbye", 30)
        assert hosted._cause is None


@pytest.mark.skipif(core is None, reason="there is no core")
@pytest.mark.parametrize("leaves", [True, False])
def test_one_thread_alone_has_the_connection(leaves: bool) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-c", HOLDER, str(theirs.fileno())]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=pipe, stdout=pipe, text=True) as process:
            theirs.close()
            assert process.stdin is not None
            assert process.stdout is not None
            seen = sorted(process.stdout.readline().split() for _ in range(2))
            assert seen == [["1", "True"], ["main", "False"]]
            if leaves:
                process.stdin.write("leave\n")
                process.stdin.flush()
                assert process.stdout.readline() == "left\n"
                assert ours.recv(8) == b"\0"
                assert process.poll() is None
            else:
                process.kill()
            assert ours.recv(8) == b""


@pytest.mark.skipif(core is None, reason="there is no core")
def test_a_forked_child_has_no_part_in_it() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        held = core.Lifeline(theirs.fileno())
        theirs.close()
        child = os.fork()
        if child == 0:
            held.let_go()  # does nothing here
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        ours.setblocking(False)
        with pytest.raises(BlockingIOError):
            ours.recv(8)
        ours.setblocking(True)
        held.let_go()
        assert ours.recv(8) == b"\0"


@pytest.mark.skipif(core is None, reason="there is no core")
def test_a_descriptor_that_is_not_open_harms_nobody() -> None:
    core.Lifeline(999_999).let_go()
