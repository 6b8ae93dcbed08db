"""Long arguments and results over several connections at once: right data, or the way over the link itself."""

from __future__ import annotations

import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.rpc.support import WORLDS, at_once, error_of, run, until

import phalanx as px
from phalanx import _native
from phalanx.deadline import Deadline
from phalanx.errors import ChannelClosed, PeerLost, RpcTimeout
from phalanx.rpc import Agent, lanes
from phalanx.rpc.lanes import LANES_FROM, lanes_with
from phalanx.rpc.pipe import Pipe, open_pipe
from phalanx.testing import run_ranks
from phalanx.transports.stream import Stream, StreamEnded, read_exactly, write_all
from phalanx.wire.calls import HEADER_SIZE, CallKind, pack_header
from phalanx.wire.packing import pack

needs_core = pytest.mark.skipif(not _native.available, reason="lanes need the core (PHALANX_PURE is set)")
LONG = 16 << 20
ENOUGH = 64 << 10
"""Bytes that go over lanes here."""


# -- between two pipes -------------------------------------------------------------------------------------------------


class Ends:
    """Two pipes, and the sockets of the lanes between them."""

    def __init__(self, lanes: int, pair: Callable[[], tuple[socket.socket, socket.socket]] = socket.socketpair) -> None:
        pairs = [pair() for _ in range(lanes + 1)]
        self.sockets = pairs[1:]
        self.out, self.into = (open_pipe(Stream(one)) for one in pairs[0])
        self.out.open_lanes([Stream(one) for one, _ in self.sockets])
        self.into.open_lanes([Stream(other) for _, other in self.sockets])
        assert self.out.native is not None
        self.native = self.out.native
        self.native.use_lanes(ENOUGH)

    def send(self, buffers: Sequence[np.ndarray[Any, Any]]) -> bool:
        """Sends a payload; False if a part of it did not go."""
        size = sum(map(len, buffers))
        sent = self.out.send(CallKind.RESULT, 7, b"head", [part.data for part in buffers], size)
        return sent == HEADER_SIZE + 4 + size

    def close(self) -> None:
        for pipe in (self.out, self.into):
            pipe.sever_lanes()
            pipe.close_lanes()
            pipe.stream.close()
        for one, other in self.sockets:
            one.close()
            other.close()


@pytest.fixture(params=[2, 3])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    made = Ends(request.param)
    yield made
    made.close()


def receive(pipe: Pipe, window: int = LONG) -> np.ndarray[Any, Any]:
    frames, end = pipe.pull(0.0, 8, 5.0), time.monotonic() + 30
    while not frames and time.monotonic() < end:  # it wakes up for a part of one, too
        frames = pipe.pull(0.0, 8, 5.0)
    [(kind, call, head, payload, _)] = frames
    assert (kind, call, head) == (CallKind.RESULT, 7, b"head")
    memory = np.zeros(payload, np.uint8)
    filled = 0
    while filled < payload:
        assert not pipe.may_sleep() or filled == payload, "poll does not see what comes over lanes"
        filled += pipe.fill(memory.data[filled : filled + window], 1.0)
        pipe.check()
        assert time.monotonic() < end
    return memory


def some(size: int, seed: int = 1) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


@needs_core
@pytest.mark.parametrize("window", [LONG, 300_001], ids=["whole", "in windows"])
@pytest.mark.parametrize("sizes", [[ENOUGH], [3 << 20], [5_000_001], [100, 1 << 20, 1, 2_345_678], [7] * 20_000])
def test_payloads_come_in_order(ends: Ends, sizes: list[int], window: int) -> None:
    for seed in range(3):
        parts = [some(size, seed + i) for i, size in enumerate(sizes)]
        sender = threading.Thread(target=ends.send, args=(parts,))
        sender.start()
        found = receive(ends.into, window)
        sender.join()
        assert np.array_equal(found, np.concatenate(parts))
    assert ends.native.laned == 3
    assert ends.into.may_sleep()


def _loopback() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        caller = socket.create_connection(server.getsockname())
        return caller, server.accept()[0]


@needs_core
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no affinity of threads")
@pytest.mark.parametrize("cores", ["all", "one"])
def test_threads_have_their_cores_back(cores: str) -> None:
    allowed = os.sched_getaffinity(0)
    if not 2 <= len(allowed) <= 16:
        pytest.skip("lanes are kept on cores where there is one for each")
    chosen = allowed if cores == "all" else {min(allowed)}
    left: list[set[int]] = []
    ends = Ends(len(allowed), _loopback)

    def send() -> None:
        os.sched_setaffinity(0, chosen)
        for seed in range(3):
            ends.send([some(9 << 20, seed)])
            left.append(os.sched_getaffinity(0))

    try:
        sender = threading.Thread(target=send)
        sender.start()
        for seed in range(3):
            assert np.array_equal(receive(ends.into), some(9 << 20, seed))
            assert os.sched_getaffinity(0) == allowed
        sender.join()
    finally:
        ends.close()
    assert left == [chosen] * 3


@needs_core
def test_a_sender_has_its_memory_back_although_nobody_reads(ends: Ends) -> None:
    first, second = some(12 << 20), some(100_000, 2)
    sent = first.copy()
    assert ends.send([sent])
    sent[:] = 0
    assert ends.send([second])  # over the link itself: what is left of the first is still to go over the lanes
    assert ends.native.laned == 1
    assert np.array_equal(receive(ends.into), first)
    assert np.array_equal(receive(ends.into), second)
    end = time.monotonic() + 10
    while ends.native.laned == 1 and time.monotonic() < end:  # the threads that had the rest are gone soon
        assert ends.send([second])
        assert np.array_equal(receive(ends.into), second)
    assert ends.native.laned == 2


@needs_core
def test_lanes_that_have_ended_are_not_used(ends: Ends) -> None:
    ends.sockets[-1][1].shutdown(socket.SHUT_RDWR)
    data = some(100_000)
    assert ends.send([data])
    assert ends.native.laned == 0
    assert np.array_equal(receive(ends.into), data)


@needs_core
def test_a_lane_that_breaks_ends_the_pipe(ends: Ends) -> None:
    assert ends.send([some(12 << 20)])
    ends.sockets[0][0].shutdown(socket.SHUT_RDWR)
    with pytest.raises(StreamEnded):
        receive(ends.into)
    assert not ends.send([some(30 << 20)]) or ends.native.laned == 1


@needs_core
def test_closing_ends_the_threads_that_send_the_rest(ends: Ends) -> None:
    before = threads_here()
    assert ends.send([some(12 << 20)])
    assert threads_here() > before
    ends.out.sever_lanes()
    ends.out.close_lanes()
    until(lambda: threads_here() == before, "the end of the threads")  # one that has ended may be listed for a moment


def test_a_rank_without_descriptors_wants_no_lanes() -> None:
    """To refuse a connection that it has agreed to would end its world."""
    mine, other = socket.socketpair()
    with mine, other:
        before = len(os.listdir("/proc/self/fd"))
        assert lanes._can_open(20, mine.fileno())
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        os.close(lowest := os.dup(mine.fileno()))  # the highest would leave all the gaps below it
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 5, hard))
            assert not lanes._can_open(200, mine.fileno())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert len(os.listdir("/proc/self/fd")) == before


def threads_here() -> int:
    return len(os.listdir("/proc/self/task"))


# -- between agents ----------------------------------------------------------------------------------------------------


def serve(agent: Agent) -> None:
    agent._connections._lanes = 2  # however many cores this machine has
    agent.register("echo", lambda x: x)
    agent.register("make", lambda count: np.arange(count, dtype=np.int32))

    @agent.register("laned")
    def laned() -> int:
        return sum(link.pipe.native.laned for link in agent._connections.servers if link.pipe.native is not None)

    @agent.register("wait")
    def wait(x: Any, seconds: float) -> None:
        time.sleep(seconds)

    @agent.register("die")
    def die(seconds: float) -> None:
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


def laned(agent: Agent, rank: int = 1) -> int:
    native = agent._connections.callers[rank].pipe.native
    return 0 if native is None else native.laned


def open_lanes(agent: Agent) -> None:
    """Calls until the lanes are there."""
    x = np.zeros(LANES_FROM, np.uint8)
    agent.call(1, "laned")
    before = laned(agent)
    until(lambda: agent.call(1, "echo", x) is not None and laned(agent) > before, "a payload over lanes")


def there_and_back(agent: Agent) -> tuple[int, int]:
    open_lanes(agent)

    def act(number: int) -> bool:
        rng = np.random.default_rng(number)
        right = True
        for _ in range(5):
            x = some(int(rng.integers(1 << 20, 9 << 20)), number)
            y = agent.call(1, "echo", x)
            right = right and np.array_equal(x, y) and y.flags.writeable
        return right

    assert at_once(3, act) == [True] * 3
    return laned(agent), agent.call(1, "laned")


@needs_core
def test_arguments_and_results_go_over_lanes() -> None:
    here, there = run("tcp", 2, serve, there_and_back)
    assert here > 5
    assert there > 5


def only_results(agent: Agent) -> int:
    until(lambda: len(agent.call(1, "make", LONG // 4)) > 0 and agent.call(1, "laned") > 0, "a result over lanes")
    return laned(agent)


@needs_core
def test_long_results_of_short_calls_open_them_too() -> None:
    assert run("tcp", 2, serve, only_results) == 0


def try_to_open(agent: Agent) -> tuple[int, int]:
    x = np.zeros(LANES_FROM, np.uint8)
    for _ in range(10):
        assert len(agent.call(1, "echo", x)) == len(x)
        time.sleep(0.01)
    return laned(agent), agent.call(1, "laned")


@pytest.mark.parametrize("kind", ["rings", "pure", "tls"])
def test_where_there_are_none(kind: str, request: pytest.FixtureRequest) -> None:
    if kind == "tls":
        WORLDS["tls"] = ("mesh", {"options": px.Options(tls=request.getfixturevalue("tls"))})
    assert run(kind, 2, serve, try_to_open) == (0, 0)


def test_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "core", object())
    monkeypatch.setattr(lanes, "usable_cores", lambda: 2)
    assert [lanes_with(spare, False) for spare in (0, 1, 2, 3, 15)] == [2, 2, 3, 4, 4]
    assert lanes_with(15, True) == 0
    monkeypatch.setattr(lanes, "usable_cores", lambda: 1)
    assert lanes_with(0, False) == 0
    monkeypatch.setattr(lanes, "core", None)
    assert lanes_with(15, False) == 0


def join_uninvited(agent: Agent) -> list[str]:
    """Joins connections with a wrong secret, and with the right one of another rank's link."""
    connections = agent._connections
    agreement = connections.callers[1].lanes if agent.rank == 0 else None
    if agent.rank == 0:
        assert agreement is not None
        secret: Any = agreement._secret  # type: ignore[union-attr]
        open_lanes(agent)
    secret = agent._group.broadcast_object(secret if agent.rank == 0 else None, 0)
    ends = []
    if agent.rank != 1:
        for words, number in [(bytes(16), 1), (b"", 1), (secret, 1), (secret, 3), (secret, 2**63)]:
            stream = connections.port.dial(1, Deadline(10))
            deadline = Deadline(10)
            write_all(stream, pack_header(CallKind.LANES, len(words), number, 0) + words, deadline, "a lane")
            ends.append(type(error_of(read_exactly, stream, 1, deadline, "the end")).__name__)
            stream.close()
    agent._group.barrier()
    if agent.rank == 0:
        open_lanes(agent)
        assert agent.call(1, "echo", some(LONG)).tobytes() == some(LONG).tobytes()
    return ends


def make_link(agent: Agent) -> list[str]:
    if agent.rank == 0:
        agent.call(1, "laned")
    agent._group.barrier()
    return join_uninvited(agent)


@needs_core
def test_nobody_joins_without_the_secret_and_the_rank() -> None:
    found = run("tcp", 3, serve, make_link, everyone=True)
    assert found == [["StreamEnded"] * 5, [], ["StreamEnded"] * 5]


def give_up(agent: Agent) -> bool:
    open_lanes(agent)
    x = some(LONG)
    for _ in range(3):
        assert isinstance(error_of(agent.call, 1, "wait", x, 1.0, timeout=0.05), RpcTimeout)
    return bool(np.array_equal(agent.call(1, "echo", x), x))


@needs_core
def test_calls_that_are_given_up() -> None:
    assert run("tcp", 2, serve, give_up, workers=1)


def lose(world: px.Group) -> bool:
    with Agent(world) as agent:
        serve(agent)
        world.barrier()
        if world.rank == 1:
            time.sleep(30)
        open_lanes(agent)
        x = some(LONG)
        agent.call(1, "die", 0.05)

        def calls() -> None:
            for _ in range(1000):
                agent.call(1, "echo", x, timeout=20)

        return isinstance(error_of(calls), (PeerLost, ChannelClosed))


@needs_core
def test_a_rank_that_dies_in_the_middle() -> None:
    options = px.Options(transport="tcp")
    assert run_ranks(2, lose, backend="mesh", timeout=40, may_die=[1], options=options)[0]


def count_descriptors(agent: Agent) -> tuple[int, int]:
    agent.call(1, "laned")
    agent.call(1, "echo", some(LANES_FROM - 1))
    before = len(list(Path("/proc/self/fd").iterdir()))
    open_lanes(agent)
    during = len(list(Path("/proc/self/fd").iterdir()))
    link = agent._connections.callers[1]
    link.end(ChannelClosed(1, "for this test"))
    until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before, "all descriptors of the link to be closed")
    return during - before, agent._connections._lanes


@needs_core
def test_descriptors_are_given_back() -> None:
    more, lanes = run("tcp", 2, serve, count_descriptors)
    assert more == lanes >= 2


class GoneLink:
    """A link whose other side goes away while lanes are agreed on, as by Ctrl-C in its first long call."""

    peer = 0
    ended: Exception | None = None
    lanes = None

    def __init__(self, sock: socket.socket) -> None:
        self.stream = Stream(sock)

    def send(self, kind: int, call: int, head: bytes) -> bool:
        raise ChannelClosed(self.peer, "the connection was closed by the other side")

    def end(self, error: Exception) -> None:
        self.ended = error


def test_a_caller_that_goes_away_in_between_is_no_breach_of_the_protocol() -> None:
    sock, other = socket.socketpair()
    link: Any = GoneLink(sock)
    lanes.ServerLanes(link, 2, []).handle(0, pack((bytes(16), 2)))  # what it offered cannot be answered
    lanes.ServerLanes(link, 2, []).handle(1, bytes(16))  # and what it has dialled belongs to no link
    assert isinstance(link.ended, ChannelClosed)
    link.stream.close()
    other.close()


@needs_core
def test_lanes_that_find_no_descriptors_leave_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    ends, sockets = socket.socketpair(), [socket.socketpair() for _ in range(2)]
    pipe = open_pipe(Stream(ends[0]))
    made: list[int] = []
    duplicate = os.dup

    def only_one(fd: int) -> int:
        if made:
            raise OSError(24, "Too many open files")
        made.append(duplicate(fd))
        return made[0]

    monkeypatch.setattr(os, "dup", only_one)
    with pytest.raises(OSError, match="Too many"):
        pipe.open_lanes([Stream(one) for one, _ in sockets])
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(made[0])
    for one in [*ends, *(one for pair in sockets for one in pair)]:
        one.close()
