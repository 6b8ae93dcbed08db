"""`Group.shrink`: the survivors of a kill agree on who is left, and go on. Real processes, real kills."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from typing import Any

import numpy as np
import pytest

from phalanx import Evicted, Group, Options, PeerLost, PhalanxError, Timeout, UnsupportedOp, UsageError
from phalanx.testing import faults, run_ranks

TRANSPORTS = pytest.mark.parametrize("transport", ["auto", "tcp"])


def run(n: int, fn: Any, *args: Any, transport: Any = "auto", may_die: Any = (), timeout: float = 60.0) -> list[Any]:
    return run_ranks(
        n, fn, *args, backend="mesh", options=Options(transport=transport), may_die=may_die, timeout=timeout
    )


def meet(group: Group) -> None:
    """A barrier that a rank may not leave before another has died behind it."""
    with contextlib.suppress(PeerLost):
        group.barrier()


def use(group: Group) -> None:
    """Reduces until a member is lost."""
    while True:
        group.all_reduce(np.ones(100_000))


def check(group: Group) -> tuple[int, tuple[int, ...], float]:
    """Uses most of a group; returns its epoch, its members, and the sum of their world ranks."""
    x = np.full(1000, group.members[group.rank], np.float64)
    group.all_reduce(x)
    big = np.full(1 << 19, group.members[group.rank], np.float32)
    group.all_reduce(big)
    assert big[-1] == x[0]
    if group.world_size > 1:
        right, left = (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size
        got = group.sendrecv(np.array([group.rank]), right, src=left)
        assert got[0] == left
    assert group.all_gather_object(group.members[group.rank]) == list(group.members)
    group.barrier()
    return group.epoch, group.members, float(x[0])


@TRANSPORTS
@pytest.mark.parametrize("victim", [0, 2])
def test_survivors_go_on(transport: str, victim: int) -> None:
    def work(world: Group) -> Any:
        check(world)
        if world.rank == victim:
            for other in range(3):  # over TCP they may still be in the barrier that this rank has left
                world.recv_object((victim + 1 + other) % 4)
            faults.kill_self()
        world.send_object("done", victim)
        with pytest.raises(PeerLost, match=f"rank {victim} is lost"):
            use(world)
        smaller = world.shrink(timeout=20)
        found = check(smaller)
        try:
            world.barrier()
        except PeerLost as error:
            return found, error.peer
        return None

    results = run(4, work, transport=transport, may_die=[victim])
    left = tuple(rank for rank in range(4) if rank != victim)
    assert [results[rank] for rank in left] == [((1, left, float(sum(left))), victim)] * 3


@TRANSPORTS
def test_two_at_once_and_then_another(transport: str) -> None:
    def work(world: Group) -> Any:
        meet(world)
        if world.rank in (0, 3):
            faults.kill_self()
        group, epochs = world, []
        while True:
            try:
                for _ in range(20):
                    group.all_reduce(np.ones(10))
                if group.epoch and group.world_size == 3 and world.rank == 4:
                    faults.kill_self()
                if group.world_size == 2:
                    return check(group), epochs
            except PeerLost:
                group = group.shrink(timeout=20)
                epochs.append(group.world_size)

    results = run(5, work, transport=transport, may_die=[0, 3, 4])
    assert results[1][0][1:] == results[2][0][1:] == ((1, 2), 3.0)
    assert results[1] == results[2]


@TRANSPORTS
def test_a_rank_lost_while_the_others_shrink(transport: str) -> None:
    """Rank 1 dies at a random moment around its own call of `shrink`."""

    def work(world: Group, delay: float) -> Any:
        meet(world)
        if world.rank == 0:
            faults.kill_self()
        try:
            while True:
                world.barrier()
        except PeerLost:
            pass
        if world.rank == 1:
            import threading

            threading.Timer(delay, faults.kill_self).start()
        group = world.shrink(timeout=20)
        while group.world_size > 2:
            try:
                while True:
                    group.all_reduce(np.ones(1000))
            except PeerLost:
                group = group.shrink(timeout=20)
        return check(group)[1:]

    for delay in (0.0, 0.002, 0.01, 0.03):
        results = run(4, work, delay, transport=transport, may_die=[0, 1])
        assert results[2] == results[3] == ((2, 3), 5.0)


def test_a_subgroup_shrinks_by_itself() -> None:
    def work(world: Group) -> Any:
        odd = world.subgroup([1, 3, 5]) if world.rank % 2 else None
        even = world.subgroup([0, 2, 4]) if world.rank % 2 == 0 else None
        meet(world)
        if world.rank == 3:
            faults.kill_self()
        if even is not None:
            time.sleep(0.5)  # what the others do does not reach this group
            return check(even)
        assert odd is not None
        try:
            while True:
                odd.barrier()
        except PeerLost:
            return check(odd.shrink(timeout=20))

    results = run(6, work, may_die=[3])
    assert results[0] == results[2] == results[4] == (0, (0, 2, 4), 6.0)
    assert results[1] == results[5] == (1, (1, 5), 6.0)


def test_a_stopped_rank_is_voted_out() -> None:
    def work(world: Group) -> Any:
        world.barrier()
        if world.rank == 1:
            faults.stop_self(3.0)
            try:
                world.barrier()
                return "it went on"
            except PhalanxError as first:
                try:
                    world.shrink(timeout=5)
                except Evicted as error:
                    return type(first).__name__, str(error)
            return "not evicted"
        with pytest.raises(Timeout, match="missing: 1"):
            world.barrier(timeout=0.5)
        smaller = world.shrink(timeout=1)
        return check(smaller)

    results = run(3, work)
    assert results[0] == results[2] == (1, (0, 2), 2.0)
    assert results[1][0] in ("Evicted", "Timeout")
    assert "voted out" in results[1][1]


def test_fewer_than_half_are_refused() -> None:
    def work(world: Group) -> Any:
        world.barrier()
        if world.rank == 0:
            try:
                world.shrink(timeout=0.3)
            except Timeout as error:
                found = error.missing
            else:
                found = ()
            return found
        time.sleep(1.0)
        return None

    assert run(3, work)[0] == (1, 2)


def test_all_may_leave_a_group_that_works() -> None:
    def work(world: Group) -> Any:
        return check(world.shrink(timeout=20))

    assert run(3, work) == [(1, (0, 1, 2), 3.0)] * 3


def test_messages_of_an_older_epoch_are_dropped() -> None:
    def work(world: Group) -> Any:
        meet(world)
        if world.rank == 2:
            faults.kill_self()
        try:
            for number in range(5):  # nobody receives these
                if world.rank == 0:
                    world.isend(np.full(3, number), 1)
            while True:
                world.barrier()
        except PeerLost:
            group = world.shrink(timeout=20)
        if group.rank == 0:
            group.send(np.full(3, 77), 1)
            return None
        return group.recv(src=0)[0].item() if group.rank == 1 else None

    assert run(3, work, may_die=[2])[1] == 77


def test_nothing_is_left_behind() -> None:
    def work(world: Group) -> Any:
        import threading

        world.all_reduce(np.ones(10))
        world.all_reduce(np.ones(10), async_op=True).wait()
        group: Group = world
        figures = []
        for _ in range(12):
            group = group.shrink(timeout=20)
            group.all_reduce(np.ones(10))
            group.all_reduce(np.ones(10), async_op=True).wait()
            group.irecv(src=(group.rank + 1) % 2)
            group.barrier()
            gc.collect()  # a thread of a lane that has ended
            figures.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
        return figures

    for figures in run(2, work):
        # A spare descriptor or thread may come and go, so several are compared; one for each view would be a leak.
        for early, late in zip(zip(*figures[1:4], strict=True), zip(*figures[-3:], strict=True), strict=True):
            assert min(late) <= max(early) + 3, figures


def test_only_the_mesh_can_shrink() -> None:
    def work(world: Group) -> Any:
        with pytest.raises(UnsupportedOp, match="mesh"):
            world.shrink()
        return True

    assert all(run_ranks(2, work))


def test_a_group_is_left_once() -> None:
    """A second call, and one in another thread, do no harm to the group that the first one made."""

    def work(world: Group) -> Any:
        import threading

        found: list[Any] = []

        def leave() -> None:
            try:
                found.append(world.shrink(timeout=20))
            except UsageError as error:
                found.append(str(error))

        threads = [threading.Thread(target=leave) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        leave()
        (smaller,) = [each for each in found if isinstance(each, Group)]
        assert all("was left for its next view" in each for each in found if each is not smaller)
        with pytest.raises((UsageError, PeerLost), match="left this group for its next view") as caught:
            world.barrier()
        assert getattr(caught.value, "peer", None) != world.rank  # no error says of a rank itself that it is lost
        return check(smaller)

    assert run(3, work) == [(1, (0, 1, 2), 3.0)] * 3
