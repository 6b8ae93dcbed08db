"""Messages that the call does not wait for: `python -m tests.group.posted_messages BACKEND` on three ranks.

They are prepared in the core. Ranks 0 and 1 talk, except in rings. They meet by `barrier`, which moves no message.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import importlib.util
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import phalanx as px
from phalanx.group.verbs.prepared import PreparedReceiveWork, PreparedSendWork, SentWork

LENGTHS = (1, 255, 256, 257, 512, 8192, 8193, 200_000)
"""Numbers of eight bytes: around the longest that travel in their heads, and longer ones."""
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


def the_core_moves_long_ones(world: px.Group) -> None:
    """Whichever is waited for first."""
    world.barrier()
    if world.rank > 1:
        return
    peer, kinds = 1 - world.rank, set()
    for number, length in enumerate(LENGTHS * 6):
        out = np.zeros(length, int)
        work = world.irecv(out, peer, timeout=20 if number % 2 else None)
        sent = world.isend(np.full(length, number), peer, timeout=20 if number % 3 else None)
        kinds |= {(type(work), type(sent), length > 256)}
        first, second = (work, sent) if number % 2 else (sent, work)
        first.wait()
        second.wait()
        assert sent.wait(1) is sent.result() is None
        assert work.wait(1) is work.result() is out
        assert (out == number).all()
    assert {(PreparedReceiveWork, SentWork, False), (PreparedReceiveWork, PreparedSendWork, True)} <= kinds
    assert not world._messages.prepared


def many_are_under_way(world: px.Group) -> None:
    """Of all lengths and three tags; they are waited for in any order."""
    world.barrier()
    if world.rank > 1:
        return
    peer, lengths = 1 - world.rank, LENGTHS * 4
    for turn in range(6):
        outs = [np.zeros(length, int) for length in lengths]
        receives = [world.irecv(out, peer, tag=i % 3) for i, out in enumerate(outs)]
        sends = [world.isend(np.full(length, i), peer, tag=i % 3) for i, length in enumerate(lengths)]
        works: list[px.Work[Any]] = [*receives, *sends] if turn % 2 else [*sends, *receives]
        for work in works if turn < 2 else reversed(works) if turn < 4 else works[::2] + works[1::2]:
            work.wait()
        assert all((out == i).all() for i, out in enumerate(outs))


def one_waits_and_one_calls(world: px.Group) -> None:
    """Prepared messages meet calls that wait."""
    world.barrier()
    if world.rank > 1:
        return
    peer = 1 - world.rank
    for number, length in enumerate(LENGTHS * 4):
        work = world.irecv(np.zeros(length, int), peer)
        world.send(np.full(length, number), peer)
        assert (work.wait() == number).all()
        sent = world.isend(np.full(length, -number), peer)
        assert (world.recv(np.zeros(length, int), peer) == -number).all()
        sent.wait()
        work = world.irecv(np.zeros(length, int), peer, tag=1)
        world.isend(np.full(length, 1), peer)
        world.isend(np.full(length, 2), peer, tag=1)
        assert (world.recv(np.zeros(length, int), peer) == 1).all()  # another message comes first, or last
        assert (work.wait() == 2).all()


def arrays_of_every_kind(world: px.Group) -> None:
    """The core moves some of them, and the general way the others."""
    world.barrier()
    if world.rank > 1:
        return
    peer = 1 - world.rank
    for dtype in ("?", "i1", "u2", "f2", "f4", "c8", "c16", "M8[s]", "S3"):
        for length in (3, 3000):
            x = np.arange(length).astype("i4").astype(dtype)
            work = world.irecv(np.zeros(length, dtype), peer)
            sent = world.isend(x, peer)
            assert (work.wait() == x).all()
            sent.wait()
            assert (world.sendrecv(x, peer, np.zeros(length, dtype), peer) == x).all()
    for unknown in (">i4", "O"):
        for length in (3, 3000):
            with pytest.raises(px.UsageError):
                world.irecv(np.zeros(length, unknown), peer)
            with pytest.raises(px.UsageError):
                world.isend(np.zeros(length, unknown), peer)
            with pytest.raises(px.UsageError):
                world.sendrecv(np.zeros(length), peer, np.zeros(length, unknown), peer)
    for length in (20, 4000):
        x, wide = np.arange(2 * length)[::2], np.ones((length, 2), int)
        works = [world.irecv(np.zeros(length, int), peer), world.irecv(wide[:, 0], peer)]
        sent = [world.isend(x, peer), world.isend(x, peer)]
        assert all((work.wait() == x).all() for work in works)
        for one in sent:
            one.wait()
        assert (wide[:, 0] == x).all()
        wide[:] = 1
        assert (world.sendrecv(wide.T, peer, np.zeros((2, length), int), peer) == 1).all()


def order_is_kept(world: px.Group) -> None:
    """Among all ways to receive, whichever is waited for first."""
    for length in LENGTHS * 2:
        outs = [np.zeros(length) for _ in range(7)]
        if world.rank == 1:
            works: list[Any] = [world.irecv(out, 0) for out in outs[:3]]
            blocking = world.recv(outs[3], 0, timeout=20)
            works += [world.irecv(out, 0) for out in outs[4:6]]
            made = world.irecv(src=None)
            works += [world.irecv(outs[6], 0)]
            for work in reversed(works):
                work.wait()
            assert (made.wait().data == 6.0).all()
            assert blocking is outs[3]
            assert [out[0] for out in outs] == [0, 1, 2, 3, 4, 5, 7]
            assert world.recv_object(0) == "last"
        elif world.rank == 0:
            for number in range(8):
                world.isend(np.full(length, float(number)), 1)
            world.send_object("last", 1)
        world.barrier()


def tags_are_kept_apart(world: px.Group) -> None:
    for length in LENGTHS:
        world.barrier()
        if world.rank == 0:
            for tag in (2, 1, 0):
                world.isend(np.full(length, float(tag)), 1, tag=tag)
        elif world.rank == 1:
            works = [world.irecv(np.zeros(length), 0, tag=tag) for tag in range(3)]
            assert all((work.wait() == tag).all() for tag, work in enumerate(works))
    world.barrier()


def nobody_waits(world: px.Group) -> None:
    """The lane's thread moves what no thread waits for; a callback and `await` are served, too."""
    for length in LENGTHS:
        out, more = np.zeros(length), np.zeros(length)
        if world.rank == 1:
            world.irecv(out, 0)  # dropped at once
            heard: list[Any] = []
            world.irecv(more, 0).add_done_callback(heard.append)
            awaited = world.irecv(np.zeros(length), 0)
            looked_at = world.irecv(np.zeros(length), 0)
        world.barrier()
        if world.rank == 0:
            sent = [world.isend(np.full(length, float(number)), 1) for number in range(1, 5)]
            sent[1].add_done_callback(lambda _work: None)
            until(sent[-1].done)
        elif world.rank == 1:

            async def wait_for_it(work: px.Work[Any]) -> Any:
                return await work

            until(lambda out=out: bool(out[-1]))
            until(lambda heard=heard: bool(heard))
            assert (out[0], more[0], heard[0].result()[0]) == (1, 2, 2)
            assert (asyncio.run(wait_for_it(awaited)) == 3).all()
            until(looked_at.done)
            assert (looked_at.result() == 4).all()
        world.barrier()


def a_receive_that_gave_up_takes_nothing(world: px.Group) -> None:
    for length in LENGTHS[::3]:
        given_up = np.zeros(length)
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
            world.isend(np.full(length, 5.0), 1)
        elif world.rank == 1:
            assert (world.irecv(np.zeros(length), 0).wait() == 5).all()
            assert not given_up.any()
        world.barrier()


def a_send_that_gave_up_is_never_received(world: px.Group) -> None:
    for length in (257, 200_000):
        if world.rank == 0:
            for seconds in (SOON, LATE):
                began = time.monotonic()
                with pytest.raises(px.Timeout, match=r"send\(dst=1\) at posted_messages.py"):
                    world.isend(np.full(length, 1), 1, timeout=seconds).wait()
                assert time.monotonic() - began >= seconds
                dropped = world.isend(np.full(length, 2), 1, timeout=seconds)
                until(dropped.done)
                assert isinstance(dropped.exception(), px.Timeout)
        world.barrier()
        if world.rank == 0:
            world.isend(np.full(length, 3), 1).wait()
        elif world.rank == 1:
            assert (world.irecv(np.zeros(length, int), 0).wait() == 3).all()
            with pytest.raises(px.Timeout):
                world.irecv(np.zeros(length, int), 0, timeout=SOON).wait()
        world.barrier()


def an_offer_is_taken_back_when_it_is_wanted(world: px.Group) -> None:
    """The receiver asks for a message whose sender gives up at that moment, and gets the next one."""
    world.barrier()
    rng = np.random.default_rng(0)
    for number in range(40):
        given_up = int(rng.integers(0, 3)) == 0
        if world.rank == 0:
            seconds = float(rng.uniform(1e-4, 4e-3))
            with contextlib.suppress(px.Timeout):
                world.isend(np.full(3000, -1), 1, timeout=seconds).wait()
                given_up = True
            world.isend(np.full(3000, number), 1).wait()
        elif world.rank == 1:
            rng.uniform()
            time.sleep(float(rng.uniform(0, 2e-3)))
            work = world.irecv(np.zeros(3000, int), 0)
            if given_up:
                time.sleep(1e-3)
            found = work.wait()[0]
            if found == -1:  # it was in time after all
                found = world.irecv(np.zeros(3000, int), 0).wait()[0]
            assert found == number
        if number % 10 == 9:
            world.barrier()
    world.barrier()


def a_wait_that_ends_leaves_it_under_way(world: px.Group) -> None:
    """A receive. By its own timeout, or by Ctrl-C."""
    for length in (1, 3000):
        out, other = np.zeros(length), np.zeros(length)
        if world.rank == 1:
            works = [world.irecv(out, 0), world.irecv(other, 0)]
            for wait in (functools.partial(works[0].wait, SOON), functools.partial(works[0].wait, timeout=LATE)):
                with pytest.raises(px.Timeout, match="is not done after") as caught:
                    wait()
                assert {entry.path.name for entry in caught.traceback} == {"posted_messages.py"}
            with pytest.raises(px.UsageError, match="timeout='soon'"):
                works[0].wait("soon")  # type: ignore[arg-type]
            interrupted(works[1].wait)
            assert not any(work.done() for work in works)
        world.barrier()
        if world.rank == 0:
            world.isend(np.full(length, 6.0), 1)
            world.isend(np.full(length, 7.0), 1)
        elif world.rank == 1:
            assert [works[1].wait()[0], works[0].wait()[0]] == [7, 6]
        world.barrier()


def a_wait_for_a_send_that_ends_leaves_it_under_way(world: px.Group) -> None:
    if world.rank == 0:
        time.sleep(LATE)  # until the other rank's thread looks no more: it would take them in
        sent = [world.isend(np.full(3000, 8.0), 1), world.isend(np.full(3000, 9.0), 1)]
        with pytest.raises(px.Timeout, match="is not done after"):
            sent[0].wait(SOON)
        interrupted(sent[1].wait)
        assert not any(work.done() for work in sent)
    world.barrier()
    if world.rank == 1:
        assert [world.recv(np.zeros(3000), 0)[0] for _ in range(2)] == [8, 9]
    elif world.rank == 0:
        for work in sent:
            work.wait()
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
            world.isend(np.full(5000, 8), 1)
        elif world.rank == 1:
            with pytest.raises(error):
                world.irecv(out, 0).wait()
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
    for length in (1, 1, 3000, 3000, 200_000):
        if world.rank == 1:
            found: list[Any] = []
            wait = functools.partial(wait_and_note, world.irecv(np.zeros(length), 0), found)
            threads = [threading.Thread(target=wait) for _ in range(3)]
            for thread in threads:
                thread.start()
        world.barrier()
        if world.rank == 0:
            world.isend(np.ones(length), 1)
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
                    length = (2, 2, 3000)[number % 3]
                    work = group.irecv(np.zeros(length), 1 - group.rank, timeout=30)
                    group.isend(np.full(length, float(number)), 1 - group.rank, timeout=30).wait()
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
        length = (1, 300, 9000)[number % 3]
        works = [world.irecv(np.zeros(length, int), (rank + step) % n) for step in (1, -1)]
        sent = [world.isend(np.full(length, rank * 1000 + number), (rank + step) % n) for step in (1, -1)]
        if number % 2:
            for work in sent:
                work.wait()
        assert [work.wait()[-1] // 1000 for work in works] == [(rank + 1) % n, (rank - 1) % n]
        right, left = (rank + 1) % n, (rank - 1) % n
        assert world.sendrecv(np.full(length, rank), right, np.zeros(length, int), left)[-1] == left
    world.barrier()


def exchanges(world: px.Group) -> None:
    """`sendrecv` sends at once and takes what comes, behind receives that were called before it."""
    world.barrier()
    for length in (2, 3000, 200_000):
        if world.rank < 2:
            exchange(world, length)
        world.barrier()
        out = np.zeros(length)
        if world.rank == 0:  # sent, and what comes does not: then it comes late
            assert (world.sendrecv(np.full(length, 1.0), 1, out, 1) == 2).all()
        elif world.rank == 1:
            world.recv(np.zeros(length), 0)
            time.sleep(LATE)
            world.send(np.full(length, 2.0), 0)
        world.barrier()


def exchanges_that_gave_up(world: px.Group) -> None:
    for length in (2, 3000, 200_000):
        world.barrier()  # a rank that still receives takes in what comes next, too
        given_up = np.zeros(length)
        if world.rank == 0:
            for seconds in (SOON, LATE):
                with pytest.raises(px.Timeout, match=r"sendrecv\(dst=1, src=1\) at posted_messages.py"):
                    world.sendrecv(np.ones(length), 1, given_up, 1, timeout=seconds)
            interrupted(lambda given_up=given_up: world.sendrecv(np.ones(len(given_up)), 1, given_up, 1))
        world.barrier()
        if world.rank == 1:
            for _ in range(3 if length == 2 else 0):  # what was sent stays sent; what was only offered is taken back
                assert (world.recv(np.zeros(length), 0) == 1).all()
            with pytest.raises(px.Timeout):
                world.recv(np.zeros(length), 0, timeout=SOON)
            world.send(np.full(length, 5.0), 0)
        elif world.rank == 0:
            assert (world.recv(np.zeros(length), 1) == 5).all()
            assert not given_up.any()
        world.barrier()


def exchange(world: px.Group, length: int) -> None:
    peer, out = 1 - world.rank, np.zeros(length)
    for number in range(100):
        assert (
            world.sendrecv(np.full(length, float(number)), peer, out, peer, timeout=20 if number % 2 else None) is out
        )
        assert (out == number).all()
    first = world.irecv(np.zeros(length), peer)
    world.isend(np.full(length, -1.0), peer)
    assert (world.sendrecv(np.full(length, -2.0), peer, out, peer) == -2).all()
    assert (first.wait() == -1).all()
    both = np.arange(2.0 * length) + 10 * world.rank
    assert (world.sendrecv(both, peer, both, peer) == np.arange(2.0 * length) + 10 * peer).all()
    with pytest.raises(px.UsageError):
        world.sendrecv(both[:-1], peer, both[1:], peer)
    with pytest.raises(px.InvalidRank):
        world.sendrecv(both, 3, out, peer)
    with pytest.raises(px.InvalidRank):
        world.sendrecv(both, peer, out, 3)
    with pytest.raises(px.SizeMismatch):
        world.sendrecv(out, peer, out[:-1].copy(), peer)


def exchanges_of_tensors(world: px.Group) -> None:
    world.barrier()
    if world.rank > 1 or importlib.util.find_spec("torch") is None:
        return
    import torch

    peer = 1 - world.rank
    for length in (3, 3000):
        for number in range(20):
            out = torch.zeros(length)
            assert world.sendrecv(torch.full((length,), float(number)), peer, out, peer) is out
            assert (out == number).all()
            work = world.irecv(out, peer)
            sent = world.isend(torch.full((length,), -1.0 - number, requires_grad=True), peer)
            assert work.wait() is out
            sent.wait()
            assert (out == -1 - number).all()
        assert (world.sendrecv(out, peer, out, peer) == out).all()
        with pytest.raises(px.UsageError):
            world.sendrecv(out[1:], peer, out[:-1], peer)


def all_gone(references: list[weakref.ref[Any]]) -> bool:
    gc.collect()
    return all(reference() is None for reference in references)


def nothing_is_kept_alive(world: px.Group) -> None:
    world.barrier()
    if world.rank < 2:
        group = world.subgroup([0, 1])
        seen = weakref.ref(group)
        arrays: list[weakref.ref[Any]] = []
        for length in (1, 3000):
            out, x = np.zeros(length), np.ones(length)
            arrays += [weakref.ref(out), weakref.ref(x)]
            work = group.irecv(out, 1 - group.rank)
            sent = group.isend(x, 1 - group.rank)
            work.wait()
            sent.wait()
            del out, x, work, sent
            until(functools.partial(all_gone, arrays))
        out, x = np.zeros(3000), np.ones(3000)
        arrays += [weakref.ref(out), weakref.ref(x)]
        group.irecv(out, 1 - group.rank)
        group.isend(x, 1 - group.rank)
        until(lambda: bool(out[-1]))
        group.close()
        del group, out, x
        until(lambda: all_gone([*arrays, seen]))
    world.barrier()


def a_group_that_is_closed_ends_them(world: px.Group) -> None:
    """Here, and on the other rank, if the two have talked."""
    world.barrier()
    if world.rank > 1:
        return
    for closes in (0, 1):
        for length in (1, 3000):
            group = world.subgroup([0, 1])
            sent = group.isend(np.ones(length), 1 - group.rank)
            group.irecv(np.zeros(length), 1 - group.rank).wait()
            sent.wait()
            work = group.irecv(np.zeros(length), 1 - group.rank)
            if group.rank == closes:
                unsent = group.isend(np.ones(3000), 1 - group.rank, tag=1)
                group.close()
                with contextlib.suppress(px.ChannelClosed, px.Closed):  # the other rank may have asked for it
                    unsent.wait()
            with pytest.raises((px.ChannelClosed, px.Closed), match="closed"):
                work.wait()
            group.close()


def a_body_comes_although_its_receiver_calls_no_more(world: px.Group) -> None:
    """One that was accepted, for no receive yet or for one that ends with its group."""
    for length in (600, 8192, 200_000):
        for closes, waits in ((False, False), (True, False), (True, True)):
            world.barrier()
            if world.rank > 1:
                continue
            group = world.subgroup([0, 1])
            if group.rank == 0:
                began = time.monotonic()
                sent = group.isend(np.ones(length), 1, timeout=4)
                group.send(np.ones(1), 1, tag=1)
                sent.wait()
                assert time.monotonic() - began < 1.5
                group.close()
            else:
                if waits:
                    group.irecv(np.zeros(length), 0)
                group.recv(np.zeros(1), 0, tag=1)
                if not closes:
                    time.sleep(2)
                    assert (group.recv(np.zeros(length), 0) == 1).all()
                group.close()
    world.barrier()


CASES = (
    the_core_moves_them,
    the_core_moves_long_ones,
    many_are_under_way,
    one_waits_and_one_calls,
    arrays_of_every_kind,
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
    exchanges_of_tensors,
    nothing_is_kept_alive,
    a_group_that_is_closed_ends_them,
    a_body_comes_although_its_receiver_calls_no_more,
)
OFFERED = (
    a_send_that_gave_up_is_never_received,
    an_offer_is_taken_back_when_it_is_wanted,
    a_wait_for_a_send_that_ends_leaves_it_under_way,
    exchanges_that_gave_up,
)
"""Where long messages are offered first, as MPI's are. A ring has room for some KiB of what nobody has asked for."""


def main() -> None:
    backend = sys.argv[1]
    with px.init(backend, timeout=60) as world:
        world.barrier()
        # Elsewhere the core prepares none.
        cases = CASES if world._messages.prepared is not None else CASES[2:]
        for case in cases + OFFERED if backend == "mpi" else cases:
            began = time.monotonic()
            case(world)
            if world.rank == 0:
                print(f"{case.__name__}: {time.monotonic() - began:.1f} s", flush=True)
    print("all of them ran", flush=True)


if __name__ == "__main__":
    main()
