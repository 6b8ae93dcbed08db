"""Long messages that the receiver reads where they lie, where the ranks of a host leave cores free."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.failures.system_calls import READ_PEER, has_secret_memory, refuse, secret_memory, siblings_can_read
from tests.group.helped import helped, helpers

import phalanx as px
from phalanx import _native
from phalanx.testing import faults, run_ranks
from phalanx.transports.lending import LEND_ALONE_FROM, LEND_FROM

pytestmark = [
    pytest.mark.skipif(not _native.available, reason="rings need the core (PHALANX_PURE is set)"),
    pytest.mark.skipif(not siblings_can_read(), reason="this machine lets no process read another's memory"),
]

LONG = (1 << 20) // 4
"""Elements of 4 bytes that may be lent, do not fit into a ring, and are worth help."""


def ring_to(group: px.Group, rank: int) -> Any:
    return group._messages._outbound[rank].stream.ring  # type: ignore[attr-defined]


def warm_up(group: px.Group) -> None:
    """A channel goes over to a ring after a few messages."""
    other, x = 1 - group.rank, np.zeros(1)
    for _ in range(5):
        group.sendrecv(x, other, src=other)


def numbers(count: int, start: int = 0) -> Any:
    return np.arange(start, start + count, dtype=np.int32)


def there_and_back(group: px.Group, counts: list[int], turns: int) -> None:
    other = 1 - group.rank
    for count in counts:
        for turn in range(turns):
            x, y = numbers(count, turn), np.full(count, -1, np.int32)
            if group.rank == 0:
                group.send(x, other)
                x[:] = -2  # it is this rank's own again
                group.recv(y, other)
            else:
                group.recv(y, other)
                group.send(y, other)
            assert np.array_equal(y, numbers(count, turn))


def until(group: px.Group, is_met: Callable[[], bool], count: int = LONG) -> None:
    """Sends on until it holds on both ranks: a receiver that has no core for 20 ms is too late for a loan."""
    for _ in range(100):
        there_and_back(group, [count], 1)
        if all(group.all_gather_object(is_met())):
            return
    raise AssertionError("no message was lent, or none was refused")


def of_many_lengths(group: px.Group) -> None:
    with helped(group) as sub:
        warm_up(sub)
        there_and_back(sub, [10, LONG - 1, LONG, LONG + 20_000, 3 * LONG + 1, 12 * LONG], 5)
        until(sub, lambda: ring_to(sub, 1 - sub.rank).lent > 0)


def test_messages_of_many_lengths() -> None:
    run_ranks(2, of_many_lengths, backend="mesh")


def without_cores(group: px.Group) -> int:
    warm_up(group)
    there_and_back(group, [3 * LONG], 3)
    alone = group._messages.spare_cores == 0
    return int(ring_to(group, 1 - group.rank).lends_from) if alone else LEND_ALONE_FROM


def test_less_is_lent_where_nobody_helps_but_the_sender() -> None:
    assert run_ranks(2, without_cores, backend="mesh") == [LEND_ALONE_FROM] * 2


def with_one_crew(group: px.Group) -> list[int]:
    with helped(group) as one, helped(group) as two:
        for sub in (one, two):
            warm_up(sub)
            before = helpers()
            until(sub, lambda sub=sub: ring_to(sub, 1 - sub.rank).lent > 0, 4 * LONG)  # type: ignore[misc]
        child = os.fork()
        if child == 0:
            os._exit(helpers())
        found = [before, helpers(), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]
        there_and_back(one, [4 * LONG], 3)
    group.barrier()
    group.close()
    deadline = time.monotonic() + 10
    while helpers() and time.monotonic() < deadline:
        time.sleep(0.01)
    return [*found, helpers()]


def test_all_groups_have_one_crew_which_ends_with_the_world() -> None:
    assert run_ranks(2, with_one_crew, backend="mesh") == [[2, 2, 0, 0]] * 2


def by_several_threads(group: px.Group) -> None:
    """Of which one has the crew at a time."""
    with helped(group) as one, helped(group) as two:
        for sub in (one, two):
            warm_up(sub)
        failed: list[BaseException] = []

        def work(sub: px.Group) -> None:
            try:
                there_and_back(sub, [LONG, 5 * LONG + 3], 12)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(sub,)) for sub in (one, two)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed, failed


def test_several_threads_receive_them_at_the_same_time() -> None:
    run_ranks(2, by_several_threads, backend="mesh")


def in_other_ways(group: px.Group) -> None:
    """What the general way receives, and what is received late."""
    with helped(group) as sub:
        warm_up(sub)
        other = 1 - sub.rank
        for turn in range(8):
            x, y = numbers(4 * LONG, turn), np.empty(4 * LONG, np.int32)
            if sub.rank == 0:
                sub.send(x, other, tag=turn)
                continue
            if turn % 4 == 0:
                sub.irecv(y, other, tag=turn).wait()
            elif turn % 4 == 1:
                sub.recv(y, tag=turn)  # from anyone
            elif turn % 4 == 2:
                time.sleep(0.05)
                y = sub.recv(src=other, tag=turn)
            else:
                done = sub.irecv(y, other, tag=turn)
                time.sleep(0.03)
                done.wait()
            assert np.array_equal(y, numbers(4 * LONG, turn))
        works = [sub.isend(numbers(2 * LONG, turn), other) for turn in range(4)]
        for turn in range(4):
            assert np.array_equal(sub.recv(src=other), numbers(2 * LONG, turn))
        for work in works:
            work.wait()
        got = sub.sendrecv(numbers(3 * LONG, sub.rank), other, src=other)
        assert np.array_equal(got, numbers(3 * LONG, other))
        there_and_back(sub, [2 * LONG], 3)


def test_whoever_receives_them() -> None:
    run_ranks(2, in_other_ways, backend="mesh")


def refused_here(group: px.Group) -> tuple[int, int]:
    with helped(group) as sub:
        warm_up(sub)
        if sub.rank == 1:
            refuse(READ_PEER, errno.EPERM)
        sub.barrier()
        there_and_back(sub, [3 * LONG], 6)
        ring = ring_to(sub, 1 - sub.rank)
        until(sub, lambda: ring.lends_from == 0 if sub.rank == 0 else ring.lent > 0)
        return ring.lends_from, ring.lent


def test_a_receiver_that_may_not_read_gets_them_through_the_ring() -> None:
    first, second = run_ranks(2, refused_here, backend="mesh")
    assert first == (0, 0)  # it was told, and lends no more
    assert second[0] == LEND_FROM
    assert second[1] > 0


def of_secret_memory(group: px.Group) -> None:
    with helped(group) as sub:
        warm_up(sub)
        if sub.rank == 0:
            x = np.frombuffer(mmap.mmap(secret_memory(4 * LONG), 4 * LONG), np.int32)
            x[:] = numbers(LONG)
            for _ in range(3):
                sub.send(x, 1)
        else:
            for _ in range(3):
                assert np.array_equal(sub.recv(src=0), numbers(LONG))


@pytest.mark.skipif(not has_secret_memory(), reason="this kernel has no secret memory")
def test_memory_that_nobody_else_may_read() -> None:
    run_ranks(2, of_secret_memory, backend="mesh")


def until_it_dies(group: px.Group, victim: int) -> str:
    with helped(group) as sub:
        warm_up(sub)
        x = numbers(20 * LONG)
        if sub.rank == victim:
            threading.Timer(0.05, faults.kill_self).start()
        try:
            while True:
                if sub.rank == 0:
                    sub.send(x, 1, timeout=20)
                else:
                    sub.recv(x, 0, timeout=20)
        except px.PeerLost as error:
            return f"{error.peer}"


@pytest.mark.parametrize("victim", [0, 1])
def test_one_of_them_dies_meanwhile(victim: int) -> None:
    found = run_ranks(2, until_it_dies, victim, backend="mesh", may_die=[victim])
    assert found[1 - victim] == f"{victim}"


def interrupted(group: px.Group) -> str:
    with helped(group) as sub:
        warm_up(sub)
        x = numbers(LONG)
        if sub.rank == 0:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                sub.send(x, 1, timeout=20)
            except KeyboardInterrupt:
                x[:] = -1
                sub.barrier()
                return "interrupted"
            return "sent"
        sub.barrier()  # without having received it
        return "met"


def test_ctrl_c_while_nobody_reads() -> None:
    assert run_ranks(2, interrupted, backend="mesh") == ["interrupted", "met"]


def a_handler_sends(group: px.Group) -> list[str]:
    """In the middle of a long message that the receiver is late for."""
    warm_up(group)
    found = []
    if group.rank == 0:

        def say(*_: object) -> None:
            try:
                group.send(np.full(8, 7, np.int32), 1, tag=1)
            except px.UsageError as error:
                found.append(str(error))

        signal.signal(signal.SIGUSR1, say)
        threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        group.send(np.full(12 * LONG, 5, np.int32), 1)
        group.send(np.full(8, 7, np.int32), 1, tag=1)
    else:
        time.sleep(0.3)
        assert set(group.recv(src=0).tolist()) == {5}
        assert group.recv(src=0, tag=1).tolist() == [7] * 8
    group.barrier()
    return found


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_signal_handler_cannot_write_into_a_message(transport: Any) -> None:
    found = run_ranks(2, a_handler_sends, backend="mesh", options=px.Options(transport=transport))
    assert found[1] == []
    assert all("in the middle of a message" in words for words in found[0])


def a_handler_aborts(group: px.Group) -> str:
    warm_up(group)
    if group.rank == 0:
        signal.signal(signal.SIGUSR1, lambda *_: group.abort("it is enough"))
        threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    else:
        time.sleep(0.3)
    try:
        if group.rank == 0:
            group.send(np.full(12 * LONG, 5, np.int32), 1, timeout=20)
            group.barrier()
        else:
            group.recv(src=0, timeout=20)
            group.barrier()
    except px.PhalanxError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_signal_handler_can_abort_in_the_middle_of_a_message(transport: Any) -> None:
    found = run_ranks(2, a_handler_aborts, backend="mesh", options=px.Options(transport=transport))
    assert all("it is enough" in words for words in found), found
