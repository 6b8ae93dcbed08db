"""Long arguments and results that the other rank reads where they lie: right data, or the way through the ring."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.failures.system_calls import (
    READ_PEER,
    forbid,
    has_secret_memory,
    hold_up,
    refuse,
    secret_memory,
    siblings_can_read,
)
from tests.rpc.support import error_of, run, until

import phalanx as px
from phalanx import _native
from phalanx.errors import PeerLost
from phalanx.rpc import Agent
from phalanx.rpc.link import CallLink
from phalanx.testing import run_ranks
from phalanx.transports.lending import LEND_FROM
from phalanx.tuning import Tuning, lookup

pytestmark = [
    pytest.mark.skipif(not _native.available, reason="rings need the core (PHALANX_PURE is set)"),
    pytest.mark.skipif(not siblings_can_read(), reason="this machine lets no process read another's memory"),
]

LONG = 16 << 20
"""Bytes that are read in several pieces."""


def pipe_of(link: CallLink) -> Any:
    assert link.pipe.native is not None
    return link.pipe.native


def lent_to(agent: Agent, rank: int) -> tuple[int, int]:
    """How often this rank has offered its arguments to another, and how many bytes that one has read."""
    pipe = pipe_of(agent._connections.callers[rank])
    return pipe.loans, pipe.lent


def lend_for(agent: Agent, seconds: float) -> None:
    """How long a sender waits for one that reads: on a busy machine that may take longer than it is worth."""
    agent._connections._lending = agent._connections._lending._replace(lend_for=seconds)


def serve(agent: Agent) -> None:
    lend_for(agent, 20.0)
    agent.register("echo", lambda x: x)
    agent.register("sum", lambda x: int(x.astype(np.int64).sum()))

    @agent.register("lent")
    def lent() -> list[int]:
        """The same of the results that this rank has returned to its only caller."""
        [link] = agent._connections.servers
        return [pipe_of(link).loans, pipe_of(link).lent]

    @agent.register("refuse")
    def refuse_here(error: int) -> None:
        refuse(READ_PEER, error)


def numbers(count: int, start: int = 0) -> Any:
    return np.arange(start, start + count, dtype=np.int32)


# -- what is read ------------------------------------------------------------------------------------------------------


def there_and_back(agent: Agent) -> list[tuple[int, ...]]:
    x = numbers(LONG // 4)
    y = agent.call(1, "echo", x)
    assert np.array_equal(x, y)
    y[:] = 0  # it is this rank's own, and writable
    return [lent_to(agent, 1), tuple(agent.call(1, "lent"))]


def many_kinds(agent: Agent) -> int:
    long = numbers(LEND_FROM // 4)
    read_only = long.copy()
    read_only.flags.writeable = False
    values: list[Any] = [
        [long, long[:7], b"between", long + 1, np.zeros(0), long[: 20 << 10]],
        {"gaps": numbers(LEND_FROM)[::3], "turned": long[::-1], "by columns": long.reshape(2, -1).T},
        read_only,
        bytes(LEND_FROM + 1),
        bytearray(b"x" * LEND_FROM),
        np.full((3, LEND_FROM), 1.5, np.float16),
        [numbers(17 << 10, start) for start in range(40)],  # long together, and each of them worth a loan
        [numbers(5 << 10, start) for start in range(200)],  # none of them is
    ]
    for value in values * 6:
        assert_same(agent.call(1, "echo", value), value)
    return lent_to(agent, 1)[0]


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert_same(list(found.values()), list(expected.values()))
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected)
    else:
        assert bytes(found) == bytes(expected)


def test_an_argument_and_a_result() -> None:
    # So it is the first time on each link; later each takes the way that was quicker.
    assert run("rings", 2, serve, there_and_back) == [(1, LONG)] * 2


def serve_with_helpers(agent: Agent) -> None:
    agent._connections._lending = agent._connections._lending._replace(helpers=3)
    serve(agent)


def test_several_threads_read() -> None:
    # As where there are cores to spare.
    assert run("rings", 2, serve_with_helpers, there_and_back) == [(1, LONG)] * 2
    assert run("rings", 2, serve_with_helpers, many_kinds) > 1


def test_values_of_all_kinds() -> None:
    assert run("rings", 2, serve, many_kinds) > 1


def from_several_threads(agent: Agent) -> None:
    errors: list[BaseException] = []

    def body(number: int) -> None:
        try:
            for turn in range(10):
                x = numbers(LEND_FROM // 4, 1000 * number + turn)
                assert np.array_equal(agent.call(1 - agent._group.rank, "echo", x), x)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_both_ranks_at_once() -> None:
    run("rings", 2, serve, from_several_threads, everyone=True)


def with_a_child(agent: Agent) -> tuple[int, int]:
    """A forked child has copies of everything, and keeps them; the other rank reads this one's."""
    x = np.full(LONG // 4, -1, np.int32)
    agent.call(1, "lent")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    x[:] = 3
    assert agent.call(1, "sum", x) == 3 * x.size
    os.close(writer)
    os.waitpid(child, 0)
    return lent_to(agent, 1)


def test_a_rank_with_a_forked_child() -> None:
    assert run("rings", 2, serve, with_a_child) == (1, LONG)


def of_a_file(agent: Agent, path: str) -> tuple[int, int]:
    x = np.asarray(np.memmap(path, np.int32, "r"))
    assert np.array_equal(agent.call(1, "echo", x), x)
    return lent_to(agent, 1)


def test_memory_that_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    numbers(LONG // 4).tofile(path)
    assert run("rings", 2, serve, of_a_file, str(path)) == (1, LONG)


# -- who may not read --------------------------------------------------------------------------------------------------


def refused(agent: Agent, who: str, error: int) -> list[Any]:
    if who == "caller":
        refuse(READ_PEER, error)
    else:
        agent.call(1, "refuse", error)
    for turn in range(40):  # so often that the slower way would be tried again
        x = numbers(LEND_FROM // 4, turn)
        assert np.array_equal(agent.call(1, "echo", x), x)
    arguments, results = lent_to(agent, 1), tuple(agent.call(1, "lent"))
    return [arguments, results] if who == "server" else [results, arguments]


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS, errno.EFAULT, errno.ENOMEM])
@pytest.mark.parametrize("who", ["caller", "server"])
def test_who_is_refused_is_offered_nothing_more(who: str, error: int) -> None:
    # As Yama's ptrace_scope and containers refuse it, old kernels, and kernels without memory.
    to_the_refused, to_the_other = run("rings", 2, serve, refused, who, error)
    assert to_the_refused == (1, 0)
    assert to_the_other[1] >= LEND_FROM


def with_a_secret(agent: Agent) -> tuple[int, int]:
    x = np.frombuffer(mmap.mmap(secret_memory(LONG), LONG), np.int32)
    x[:] = numbers(LONG // 4)
    assert np.array_equal(agent.call(1, "echo", x), x)
    return lent_to(agent, 1)


@pytest.mark.skipif(not has_secret_memory(), reason="this kernel has no memory that others cannot read")
def test_memory_that_only_its_own_process_can_read() -> None:
    assert run("rings", 2, serve, with_a_secret) == (1, 0)


def never(group: px.Group) -> int:
    lookup._known[:] = [Tuning(copy_once_from=1 << 40)]
    forbid(READ_PEER)  # it is not even tried
    with Agent(group) as agent:
        serve(agent)
        group.barrier()
        x = numbers(LONG // 4)
        assert np.array_equal(agent.call(1 - group.rank, "echo", x), x)
        group.barrier()
        return lent_to(agent, 1 - group.rank)[0]


def test_it_can_be_switched_off() -> None:
    assert run_ranks(2, never, backend="mesh") == [0, 0]


# -- what happens meanwhile --------------------------------------------------------------------------------------------


class Signs:
    """Files by which processes tell each other how far they are, though their links are held up."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def give(self, name: str) -> None:
        (self._folder / name).touch()

    def given(self, name: str) -> bool:
        return (self._folder / name).exists()

    def wait(self, name: str) -> None:
        until(lambda: self.given(name), f"the sign {name!r}", 30.0)


def held_agent(world: px.Group, folder: str) -> Agent:
    """An agent whose threads can be held up in the middle of a payload that they read in another process."""
    signs = Signs(folder)
    reads: list[int] = []
    sums: list[int] = []

    def wait(turn: int) -> None:
        if reads:
            reads.append(turn)
        if len(reads) == 4:  # after the proof and the first piece
            signs.give("held")
            signs.wait("go on")

    world.barrier()  # the group's own read of the other processes has the GIL, which `wait` needs
    hold_up(READ_PEER, wait)  # in this thread, and in those that are made from now on
    agent = Agent(world, timeout=30)
    lend_for(agent, 2.0)
    agent.register("hold", lambda: reads.append(0))
    agent.register("add", lambda x: sums.append(int(x.astype(np.int64).sum())))
    agent.register("sums", lambda: sums)
    world.barrier()
    return agent


def run_held(n: int, fn: Callable[..., Any], folder: Path, *args: Any, may_die: Collection[int] = ()) -> Any:
    return run_ranks(n, fn, str(folder), *args, backend="mesh", timeout=60, may_die=may_die)


def changed_after_it_was_issued(world: px.Group, folder: str) -> list[int]:
    signs, agent = Signs(folder), held_agent(world, folder)
    sums = []
    if world.rank == 0:
        agent.call(1, "hold")
        x = np.ones(LONG // 2, np.uint8)  # so many may be queued
        future = agent.call_async(1, "add", x)  # returns without the reader, which is held up
        x[:] = 2
        signs.wait("held")
        signs.give("go on")
        future.result(30)
        assert lent_to(agent, 1)[1] < x.nbytes
        x[:] = 3
        agent.call(1, "add", x)
        sums = list(agent.call(1, "sums"))
    world.barrier()
    return sums


def test_who_waits_no_more_may_change_its_array(tmp_path: Path) -> None:
    assert run_held(2, changed_after_it_was_issued, tmp_path)[0] == [LONG // 2, 3 * LONG // 2]


def given_up(world: px.Group, folder: str, why: str) -> list[int]:
    signs, agent = Signs(folder), held_agent(world, folder)
    sums = []

    def interrupt() -> None:
        signs.wait("held")
        os.kill(os.getpid(), signal.SIGINT)

    if world.rank == 0:
        agent.call(1, "hold")
        x = np.ones(LONG, np.uint8)
        if why == "interrupt":
            threading.Thread(target=interrupt, daemon=True).start()
            with pytest.raises(KeyboardInterrupt):
                agent.call(1, "add", x)
        else:
            assert isinstance(error_of(agent.call, 1, "add", x, timeout=0.5), px.Timeout)
        x[:] = 2
        signs.wait("held")
        signs.give("go on")
        agent.call(1, "add", x)
        sums = list(agent.call(1, "sums"))
    world.barrier()
    return sums


@pytest.mark.parametrize("why", ["time is over", "interrupt"])
def test_a_call_that_is_given_up(tmp_path: Path, why: str) -> None:
    # It may have been run, with what it was given; never with what the array was changed to since.
    assert run_held(2, given_up, tmp_path, why)[0] in ([2 * LONG], [LONG, 2 * LONG])


def sender_dies(world: px.Group, folder: str) -> list[int]:
    signs, agent = Signs(folder), held_agent(world, folder)
    pids = world.all_gather_object(os.getpid())

    def end() -> None:
        signs.wait("held")
        os.kill(os.getpid(), signal.SIGKILL)

    if world.rank == 1:
        agent.call(0, "hold")
        threading.Thread(target=end, daemon=True).start()
        agent.call(0, "add", np.ones(LONG, np.uint8))
    until(lambda: is_dead(pids[1]), "the end of the caller", 30.0)
    if world.rank == 0:
        signs.give("go on")
        signs.wait("done")
        return []
    signs.wait("go on")
    try:
        return list(agent.call(0, "sums"))
    finally:
        signs.give("done")


def is_dead(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_sender_that_dies(tmp_path: Path) -> None:
    assert run_held(3, sender_dies, tmp_path, may_die=[1])[2] == []


def reader_dies(world: px.Group, folder: str) -> Any:
    agent = held_agent(world, folder)
    if world.rank == 1:
        Signs(folder).wait("held")
        os.kill(os.getpid(), signal.SIGKILL)
    agent.call(1, "hold")
    error = error_of(agent.call, 1, "add", np.ones(LONG, np.uint8))
    return isinstance(error, PeerLost), getattr(error, "peer", None)


def test_a_reader_that_dies(tmp_path: Path) -> None:
    assert run_held(2, reader_dies, tmp_path, may_die=[1])[0] == (True, 1)
