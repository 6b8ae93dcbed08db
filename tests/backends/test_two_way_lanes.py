"""Over plain TCP two ranks share one connection of a lane for both directions, whoever opens it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import phalanx as px
from phalanx.backends.mesh.lane import MeshLane
from phalanx.testing import run_ranks

TCP = {"PHALANX_TRANSPORT": "tcp"}


def descriptors(group: px.Group, peer: int) -> tuple[int, int]:
    """Those by which the lane of messages sends to a peer and hears from it."""
    lane: Any = group._messages
    [inbound] = lane.inbound(peer)
    return lane._outbound[peer].stream.fd, inbound.stream.fd


def connections() -> list[str]:
    """The sockets of this process that the kernel knows as connected."""
    inodes = {line.split()[9] for line in Path("/proc/net/tcp").read_text().splitlines() if line.split()[3] == "01"}
    links = []
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(entry.path))
    return [link for link in links if link.startswith("socket:[") and link[8:-1] in inodes]


def _one_begins(group: px.Group, first: int) -> bool:
    peer, x = 1 - group.rank, np.full(3, float(group.rank))
    for _ in range(3):
        if group.rank == first:
            group.send(x, peer)
        assert group.rank == first or group.recv(np.zeros(3), peer)[0] == peer
        if group.rank != first:
            group.send(x, peer)
        assert group.rank != first or group.recv(np.zeros(3), peer)[0] == peer
    sends, hears = descriptors(group, peer)
    return sends == hears


@pytest.mark.parametrize("env", [TCP, TCP | {"PHALANX_PURE": "1"}], ids=["core", "pure"])
@pytest.mark.parametrize("first", [0, 1])
def test_the_answer_comes_by_the_same_connection(first: int, env: dict[str, str]) -> None:
    assert run_ranks(2, _one_begins, first, backend="mesh", env=env) == [True, True]


def _all_at_once(group: px.Group) -> int:
    shared = 0
    for _ in range(20):
        part = group.subgroup(range(group.world_size))
        x = np.full(4, float(group.rank))
        for peer in range(group.world_size):
            if peer != group.rank:
                assert part.sendrecv(x, peer, np.zeros(4), peer)[0] == peer
                sends, hears = descriptors(part, peer)
                shared += sends == hears
        part.close()
    return shared


def test_both_open_it_at_the_same_time() -> None:
    """Nearly always one of the two connections stays, and the data are right in any case."""
    assert sum(run_ranks(3, _all_at_once, backend="mesh", env=TCP)) > 60  # of 120


def _two_connections(group: px.Group) -> list[bool]:
    """Both ranks have opened one before either has heard of the other's."""
    MeshLane.connects_to = lambda lane, rank: False  # type: ignore[method-assign]
    dial = MeshLane._dial
    lane: Any = None

    def at_the_same_time(self: MeshLane, *args: Any) -> Any:
        if self is lane:
            time.sleep(0.2)  # the other one is here by now, and knows nothing of this one
        return dial(self, *args)

    MeshLane._dial = at_the_same_time  # type: ignore[method-assign]
    group.barrier()
    part = group.subgroup([0, 1])
    lane = part._messages
    group.barrier()
    peer, found = 1 - group.rank, []
    for i in range(50):
        x = np.full(5, float(i + group.rank))
        found.append(part.sendrecv(x, peer, np.zeros(5), peer)[0] == i + peer)
    sends, hears = descriptors(part, peer)
    assert part._messages._inbound, "both have opened one"
    both = {os.readlink(f"/proc/self/fd/{fd}") for fd in (sends, hears)}
    assert len(both & set(connections())) == 2
    group.barrier()  # or the other rank may have closed them by now
    part.close()
    group.barrier()
    assert not both & set(connections())
    return found


def test_each_sends_by_its_own_if_both_are_there() -> None:
    assert run_ranks(2, _two_connections, backend="mesh", env=TCP) == [[True] * 50] * 2


def _leaves(group: px.Group) -> str:
    """Rank 0 has sent to rank 1, which never answers, and leaves."""
    if group.rank == 1:
        assert group.recv(np.zeros(2), 0)[0] == 1.0
        return ""
    group.send(np.ones(2), 1)
    began = time.monotonic()
    with pytest.raises(px.ChannelClosed) as raised:
        group.recv(np.zeros(2), 1, timeout=20)
    assert time.monotonic() - began < 10
    return str(raised.value)


def test_a_rank_that_leaves_without_an_answer() -> None:
    assert "rank 1 is no longer there" in run_ranks(2, _leaves, backend="mesh", env=TCP)[0]


def _answers_and_leaves(group: px.Group) -> float:
    """What a rank has sent before it left arrives, though the other one looks for it only then."""
    if group.rank == 1:
        group.recv(np.zeros(2), 0)
        group.send(np.full(2, 7.0), 0)
        return 0.0
    group.send(np.ones(2), 1)
    time.sleep(1.0)
    return float(group.recv(np.zeros(2), 1)[0])


@pytest.mark.parametrize("env", [TCP, TCP | {"PHALANX_PURE": "1"}], ids=["core", "pure"])
def test_the_last_answer_of_a_rank_that_left(env: dict[str, str]) -> None:
    assert run_ranks(2, _answers_and_leaves, backend="mesh", env=env)[0] == 7.0


def _closes(group: px.Group) -> tuple[str, int]:
    part = group.subgroup([0, 1])
    peer = 1 - group.rank
    if group.rank == 0:
        part.send(np.ones(2), peer)

        def send_on() -> None:
            for _ in range(1000):  # until it hears of it
                part.send(np.ones(1 << 16), peer, timeout=20)

        with pytest.raises(px.ChannelClosed) as raised:
            send_on()
        part.close()
        said = str(raised.value)
    else:
        assert part.recv(np.zeros(2), peer)[0] == 1.0
        part.close()
        said = ""
    group.barrier()
    return said, len(os.listdir("/proc/self/fd"))


def test_a_group_that_is_closed_at_the_other_side() -> None:
    assert "closed this group" in run_ranks(2, _closes, backend="mesh", env=TCP)[0][0]


def _many_groups(group: px.Group) -> None:
    def once() -> None:
        part = group.subgroup(range(group.world_size))
        part.all_reduce(np.ones(3))
        if part.rank == 0:
            part.send(np.ones(3), 1)
        elif part.rank == 1:
            part.recv(np.zeros(3), 0)
        part.close()

    def count() -> int:
        group.barrier()
        time.sleep(0.1)  # for what the reactor is about to close
        return len(os.listdir("/proc/self/fd"))

    for _ in range(10):
        once()
    before = count()
    for _ in range(60):
        once()
    assert count() <= before + 2


def test_closed_groups_leave_no_connections() -> None:
    run_ranks(3, _many_groups, backend="mesh", env=TCP, timeout=120)


def _sends_and_goes(group: px.Group, size: int, how: str) -> int:
    """Rank 0 sends, and closes or drops the group; rank 1 reports to it a moment later, and then receives."""
    arrived = 0
    for _ in range(6):
        pair: px.Group | None = group.subgroup([0, 1])
        assert pair is not None
        if group.rank == 0:
            pair.send(np.full(size, 7, np.uint8), 1)
            if how == "close":
                pair.close()
            pair = None
        else:
            for _ in range(3):
                time.sleep(0.01)
                with contextlib.suppress(px.PeerLost):
                    pair.send(np.zeros(10, np.uint8), 0)
            arrived += bool((pair.recv(src=0) == 7).all())
            pair.close()
        group.barrier()
    return arrived


@pytest.mark.parametrize("env", [TCP, TCP | {"PHALANX_PURE": "1"}], ids=["core", "pure"])
@pytest.mark.parametrize("how", ["close", "drop"])
@pytest.mark.parametrize("size", [1000, 100_000, 400_000])
def test_what_was_sent_before_a_close_arrives_whatever_the_other_rank_sends(
    size: int, how: str, env: dict[str, str]
) -> None:
    assert run_ranks(2, _sends_and_goes, size, how, backend="mesh", env=env) == [0, 6]


def _sends_and_leaves(group: px.Group) -> int:
    if group.rank == 0:
        group.send(np.full(400_000, 7, np.uint8), 1)
        return 0
    time.sleep(0.2)
    with contextlib.suppress(px.PeerLost):
        group.send(np.zeros(10, np.uint8), 0)
    return int((group.recv(src=0) == 7).sum())


def test_what_was_sent_before_a_rank_left_the_world_arrives() -> None:
    assert run_ranks(2, _sends_and_leaves, backend="mesh", env=TCP) == [0, 400_000]


def _interrupted_while_it_opens(group: px.Group) -> float:
    """A handler raises just when rank 0 has opened its connection; the program goes on, and sends again."""
    if group.rank == 1:
        return float(group.recv(np.zeros(3), 0, tag=2)[0])

    class Interrupted(Exception):
        pass

    def handle(*_: object) -> None:
        raise Interrupted

    way_to = MeshLane._way_to

    def opened(lane: MeshLane, *args: Any) -> Any:
        found = way_to(lane, *args)
        signal.raise_signal(signal.SIGALRM)
        time.sleep(0.1)
        return found

    signal.signal(signal.SIGALRM, handle)
    MeshLane._way_to = opened  # type: ignore[method-assign]
    with pytest.raises(Interrupted):
        group.send(np.ones(3), 1, tag=1)
    MeshLane._way_to = way_to  # type: ignore[method-assign]
    group.send(np.full(3, 2.0), 1, tag=2)
    return 0.0


@pytest.mark.parametrize("env", [TCP, {}], ids=["tcp", "auto"])
def test_a_message_after_an_interrupt_that_came_while_its_channel_was_opened(env: dict[str, str]) -> None:
    assert run_ranks(2, _interrupted_while_it_opens, backend="mesh", env=env) == [0.0, 2.0]
