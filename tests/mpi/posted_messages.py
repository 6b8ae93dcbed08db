"""Short messages through MPI that the call does not wait for: `python -m tests.mpi.posted_messages` on three ranks.

Their receives are prepared in the core. Ranks 0 and 1 talk, except in `in_a_ring`. They meet by `barrier`, which moves
no message.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import phalanx as px
from phalanx.group.verbs.prepared import PreparedReceiveWork, SentWork

SOON, LATE = 0.02, 0.2
"""Seconds before and after the core leaves a wait to the general way."""


def interrupted(call: Callable[[], object]) -> None:
    """Calls something that Ctrl-C ends."""
    timer = threading.Timer(LATE, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        call()
    timer.join()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def the_core_moves_them(world: px.Group) -> None:
    """Also tensors, of any tag, with a timeout, and empty ones."""
    world.barrier()
    if world.rank > 1:
        return
    peer, kinds = 1 - world.rank, set()
    for number, shape in enumerate([(1,), (3, 5), (0,), (), (256,)] * 20):
        out = np.zeros(shape)
        work = world.irecv(out, peer, tag=number % 3, timeout=20 if number % 2 else None)
        sent = world.isend(np.full(shape, float(number)), peer, tag=number % 3)
        kinds |= {type(work), type(sent)}  # on a busy machine, some go the general way
        assert sent.wait() is None
        assert work.wait() is out
        assert work.wait(1) is work.result() is out
        assert work.done()
        assert (out == number).all()
    assert {PreparedReceiveWork, SentWork} <= kinds
    assert not world._messages.prepared


def longer_ones_are_posted(world: px.Group) -> None:
    if world.rank == 1:
        long = world.irecv(np.zeros(5000), 0)
        assert type(long) is not PreparedReceiveWork
        short = world.irecv(np.zeros(1), 0)  # must not overtake it
        assert type(short) is not PreparedReceiveWork
    world.barrier()
    if world.rank == 0:
        world.send(np.full(5000, 1.0), 1)
        world.send(np.full(1, 2.0), 1)
    elif world.rank == 1:
        assert (long.wait() == 1).all()
        assert short.wait() == 2
    world.barrier()


def order_is_kept(world: px.Group) -> None:
    """Among all ways to receive, whichever is waited for first."""
    for _ in range(10):
        outs = [np.zeros(1) for _ in range(7)]
        if world.rank == 1:
            works: list[Any] = [world.irecv(out, 0) for out in outs[:3]]
            blocking = world.recv(outs[3], 0, timeout=20)
            works += [world.irecv(out, 0) for out in outs[4:6]]
            made = world.irecv(src=None)
            works += [world.irecv(outs[6], 0)]
            for work in reversed(works):
                work.wait()
            assert made.wait().data.tolist() == [6.0]
            assert blocking is outs[3]
            assert [out[0] for out in outs] == [0, 1, 2, 3, 4, 5, 7]
            assert world.recv_object(0) == "last"
        elif world.rank == 0:
            for number in range(8):
                world.isend(np.full(1, float(number)), 1)
            world.send_object("last", 1)
        world.barrier()


def tags_are_kept_apart(world: px.Group) -> None:
    world.barrier()
    if world.rank == 0:
        for tag in (2, 1, 0):
            world.isend(np.full(2, float(tag)), 1, tag=tag)
    elif world.rank == 1:
        works = [world.irecv(np.zeros(2), 0, tag=tag) for tag in range(3)]
        assert [work.wait().tolist() for work in works] == [[0, 0], [1, 1], [2, 2]]
    world.barrier()


def nobody_waits(world: px.Group) -> None:
    """The lane's thread posts what no thread waits for; a callback and `await` are served, too."""
    out, more = np.zeros(1), np.zeros(1)
    if world.rank == 1:
        world.irecv(out, 0)  # dropped at once
        heard: list[Any] = []
        world.irecv(more, 0).add_done_callback(heard.append)
        awaited = world.irecv(np.zeros(1), 0)
        looked_at = world.irecv(np.zeros(1), 0)
    world.barrier()
    if world.rank == 0:
        for number in range(1, 5):
            world.isend(np.full(1, float(number)), 1)
    elif world.rank == 1:

        async def wait_for_it() -> Any:
            return await awaited

        until(lambda: bool(out[0]))
        until(lambda: bool(heard))
        assert (out[0], more[0], heard[0].result()[0]) == (1, 2, 2)
        assert asyncio.run(wait_for_it()) == 3
        until(looked_at.done)
        assert looked_at.result() == 4
    world.barrier()


def a_receive_that_gave_up_takes_nothing(world: px.Group) -> None:
    given_up = np.zeros(1)
    if world.rank == 1:
        for seconds in (SOON, LATE):
            began = time.monotonic()
            with pytest.raises(px.Timeout, match=r"recv\(src=0\) at posted_messages.py"):
                world.irecv(given_up, 0, timeout=seconds).wait()
            assert time.monotonic() - began >= seconds
            dropped = world.irecv(given_up, 0, timeout=seconds)
            until(dropped.done)
            assert isinstance(dropped.exception(), px.Timeout)
    world.barrier()
    if world.rank == 0:
        world.isend(np.full(1, 5.0), 1)
    elif world.rank == 1:
        assert world.irecv(np.zeros(1), 0).wait() == 5
        assert not given_up.any()
    world.barrier()


def a_wait_that_ends_leaves_it_under_way(world: px.Group) -> None:
    """By its own timeout, or by Ctrl-C."""
    out, other = np.zeros(1), np.zeros(1)
    if world.rank == 1:
        works = [world.irecv(out, 0), world.irecv(other, 0)]
        with pytest.raises(px.Timeout, match="is not done after"):
            works[0].wait(SOON)
        interrupted(works[1].wait)
        assert not any(work.done() for work in works)
    world.barrier()
    if world.rank == 0:
        world.isend(np.full(1, 6.0), 1)
        world.isend(np.full(1, 7.0), 1)
    elif world.rank == 1:
        assert [works[1].wait()[0], works[0].wait()[0]] == [7, 6]
    world.barrier()


def what_does_not_fit_is_written_nowhere(world: px.Group) -> None:
    world.barrier()
    outs: list[tuple[Any, np.ndarray[Any, Any]]] = [
        (px.SizeMismatch, np.zeros(3, int)),
        (px.SizeMismatch, np.zeros(1, int)),
        (px.UsageError, np.zeros(2)),
    ]
    for error, out in outs:
        if world.rank == 0:
            world.isend(np.full(2, 8), 1)
        elif world.rank == 1:
            with pytest.raises(error):
                world.irecv(out, 0).wait()
            assert not out.any()
    if world.rank == 0:
        world.isend(np.full((1, 2), 9), 1)
        world.send(np.full(5000, 9), 1)
    elif world.rank == 1:
        assert (world.irecv(np.zeros(2, int), 0).wait() == 9).all()  # another shape does
        with pytest.raises(px.SizeMismatch):  # a long message, which is only offered
            world.irecv(np.zeros(2, int), 0).wait()
    world.barrier()


def wait_and_note(work: px.Work[Any], found: list[Any]) -> None:
    found.append(work.wait())


def two_threads_wait_for_one(world: px.Group) -> None:
    for _ in range(5):
        if world.rank == 1:
            found: list[Any] = []
            wait = functools.partial(wait_and_note, world.irecv(np.zeros(1), 0), found)
            threads = [threading.Thread(target=wait) for _ in range(3)]
            for thread in threads:
                thread.start()
        world.barrier()
        if world.rank == 0:
            world.isend(np.ones(1), 1)
        elif world.rank == 1:
            for thread in threads:
                thread.join()
            assert [one[0] for one in found] == [1, 1, 1]
        world.barrier()


def in_two_groups_by_a_thread_each(world: px.Group) -> None:
    with world.subgroup([1, 0]) if world.rank < 2 else contextlib.nullcontext() as other:
        failures: list[BaseException] = []

        def talk(group: px.Group) -> None:
            try:
                for number in range(300):
                    work = group.irecv(np.zeros(2), 1 - group.rank, timeout=30)
                    group.isend(np.full(2, float(number)), 1 - group.rank, timeout=30).wait()
                    assert (work.wait() == number).all()
            except BaseException as error:
                failures.append(error)

        threads = [] if other is None else [threading.Thread(target=talk, args=[group]) for group in (world, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
        world.barrier()


def in_a_ring(world: px.Group) -> None:
    n, rank = world.world_size, world.rank
    for number in range(200):
        works = [world.irecv(np.zeros(1, int), (rank + step) % n) for step in (1, -1)]
        for step in (1, -1):
            world.isend(np.full(1, rank * 1000 + number), (rank + step) % n)
        assert [work.wait()[0] // 1000 for work in works] == [(rank + 1) % n, (rank - 1) % n]
    world.barrier()


def exchanges(world: px.Group) -> None:
    """`sendrecv` sends at once and takes what comes, behind receives that were called before it."""
    world.barrier()
    if world.rank < 2:
        peer, out = 1 - world.rank, np.zeros(2)
        for number in range(200):
            assert world.sendrecv(np.full(2, float(number)), peer, out, peer) is out
            assert (out == number).all()
        first = world.irecv(np.zeros(2), peer)
        world.isend(np.full(2, -1.0), peer)
        assert (world.sendrecv(np.full(2, -2.0), peer, out, peer) == -2).all()
        assert (first.wait() == -1).all()
        both = np.arange(4.0) + 10 * world.rank
        assert (world.sendrecv(both, peer, both, peer) == np.arange(4.0) + 10 * peer).all()
        with pytest.raises(px.UsageError):
            world.sendrecv(both[:3], peer, both[1:], peer)
        with pytest.raises(px.InvalidRank):
            world.sendrecv(both, 3, out, peer)
        with pytest.raises(px.InvalidRank):
            world.sendrecv(both, peer, out, 3)
    given_up = np.zeros(2)
    if world.rank == 0:
        for seconds in (SOON, LATE):
            with pytest.raises(px.Timeout, match=r"sendrecv\(dst=1, src=1\) at posted_messages.py"):
                world.sendrecv(np.ones(2), 1, given_up, 1, timeout=seconds)
        interrupted(lambda: world.sendrecv(np.ones(2), 1, given_up, 1))
    world.barrier()
    if world.rank == 1:
        for _ in range(3):  # what was sent stays sent
            assert (world.recv(np.zeros(2), 0) == 1).all()
        world.send(np.full(2, 5.0), 0)
    elif world.rank == 0:
        assert (world.recv(np.zeros(2), 1) == 5).all()
        assert not given_up.any()
    world.barrier()


def nothing_is_kept_alive(world: px.Group) -> None:
    world.barrier()
    if world.rank < 2:
        group = world.subgroup([0, 1])
        seen = weakref.ref(group)
        out = np.zeros(1)
        work = group.irecv(out, 1 - group.rank)
        group.isend(np.ones(1), 1 - group.rank)
        work.wait()
        array = weakref.ref(out)
        group.close()
        del group, out, work
        gc.collect()
        assert array() is None
        assert seen() is None
    world.barrier()


def a_group_that_is_closed_ends_them(world: px.Group) -> None:
    """Here, and on the other rank, if the two have talked."""
    world.barrier()
    if world.rank > 1:
        return
    for closes in (0, 1):
        group = world.subgroup([0, 1])
        group.isend(np.ones(1), 1 - group.rank)
        group.irecv(np.zeros(1), 1 - group.rank).wait()
        work = group.irecv(np.zeros(1), 1 - group.rank)
        if group.rank == closes:
            group.close()
        with pytest.raises((px.ChannelClosed, px.Closed), match="closed"):
            work.wait()
        group.close()


CASES = (
    the_core_moves_them,
    longer_ones_are_posted,
    order_is_kept,
    tags_are_kept_apart,
    nobody_waits,
    a_receive_that_gave_up_takes_nothing,
    a_wait_that_ends_leaves_it_under_way,
    what_does_not_fit_is_written_nowhere,
    two_threads_wait_for_one,
    in_two_groups_by_a_thread_each,
    in_a_ring,
    exchanges,
    nothing_is_kept_alive,
    a_group_that_is_closed_ends_them,
)


def main() -> None:
    with px.init("mpi", timeout=60) as world:
        world.barrier()
        for case in CASES:
            began = time.monotonic()
            case(world)
            if world.rank == 0:
                print(f"{case.__name__}: {time.monotonic() - began:.1f} s", flush=True)
    print("all of them ran", flush=True)


if __name__ == "__main__":
    main()
