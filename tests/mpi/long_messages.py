"""Long messages through MPI, which the receiver asks for: `python -m tests.mpi.long_messages` on three ranks.

Ranks 0 and 1 talk, except in `in_a_ring`. They meet by `barrier`, which moves no message.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import phalanx as px

LENGTHS = (300, 5_000, 200_000)
"""Numbers of eight bytes: all of them too long to travel in a head."""
SOON, LATE = 0.02, 0.2
"""Seconds before and after the core leaves a wait to the general way."""


def interrupted(call: Callable[[], object]) -> None:
    """Calls something that Ctrl-C ends."""
    timer = threading.Timer(LATE, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        call()
    timer.join()


def the_core_moves_them(world: px.Group) -> None:
    fast: Any = world._fast_messages
    for length in LENGTHS:
        x = np.arange(length) if world.rank == 0 else np.zeros(length, int)
        world.barrier()
        done = []
        for _ in range(20):  # a machine with other work may take longer than the core waits
            if world.rank == 0:
                done.append(fast.send(x, 1, 0))
            elif world.rank == 1:
                done.append(fast.recv(x, 0, 0))
            for answer in done[-1:]:
                if isinstance(answer, tuple):
                    assert answer[0] is not None or world.rank == 1, answer
                    finish(world, answer[0], x)
        assert world.rank > 1 or True in done, done
        assert world.rank > 1 or (x == np.arange(length)).all()


def finish(world: px.Group, operation: Any, x: Any) -> None:
    """Goes on with what the core has left to the general way."""
    if operation is None:
        world.recv(x, 0)
    else:
        assert world._messages.wait([operation], world._deadline(20))
        assert operation.error is None


def a_send_that_raised_is_never_received(world: px.Group) -> None:
    for length in LENGTHS:
        for seconds in (SOON, LATE):
            if world.rank == 0:
                with pytest.raises(px.Timeout):
                    world.send(np.full(length, 1), 1, timeout=seconds)
                with pytest.raises(px.Timeout):
                    world.isend(np.full(length, 2), 1, timeout=seconds).wait()
                interrupted(lambda length=length: world.send(np.full(length, 3), 1))
            world.barrier()
            if world.rank == 0:
                world.send(np.full(length, 4), 1)
            elif world.rank == 1:
                assert (world.recv(np.zeros(length, int), 0) == 4).all()
                with pytest.raises(px.Timeout):
                    world.recv(np.zeros(length, int), 0, timeout=SOON)
            world.barrier()


def a_receive_that_raised_takes_nothing(world: px.Group) -> None:
    for length in LENGTHS:
        given_up = np.zeros(length, int)
        if world.rank == 1:
            for seconds in (SOON, LATE):
                with pytest.raises(px.Timeout):
                    world.recv(given_up, 0, timeout=seconds)
            interrupted(lambda given_up=given_up: world.recv(given_up, 0))
        world.barrier()
        if world.rank == 0:
            world.send(np.full(length, 5), 1)
        elif world.rank == 1:
            assert (world.recv(np.zeros(length, int), 0) == 5).all()
            assert not given_up.any()
        world.barrier()


def what_does_not_fit_is_written_nowhere(world: px.Group) -> None:
    for length in LENGTHS:
        outs: list[tuple[Any, np.ndarray[Any, Any]]] = [
            (px.SizeMismatch, np.zeros(length + 1, int)),
            (px.SizeMismatch, np.zeros(length // 2, int)),
            (px.SizeMismatch, np.zeros(1, int)),
            (px.UsageError, np.zeros(length)),
        ]
        world.barrier()
        for error, out in outs:
            if world.rank == 0:
                world.send(np.full(length, 6), 1)
            elif world.rank == 1:
                with pytest.raises(error):
                    world.recv(out, 0)
                assert not out.any()
        if world.rank == 0:
            world.send(np.full(length, 7), 1)
        elif world.rank == 1:
            assert (world.recv(np.zeros((length // 2, 2), int), 0) == 7).all()  # another shape does
        world.barrier()


def both_send_first(world: px.Group) -> None:
    """And in two groups, by a thread each."""
    with world.subgroup([1, 0]) if world.rank < 2 else contextlib.nullcontext() as other:
        failures: list[BaseException] = []

        def talk(group: px.Group) -> None:
            try:
                for number, length in enumerate(LENGTHS * 10):
                    group.send(np.full(length, number), 1 - group.rank, timeout=30)
                    assert (group.recv(np.zeros(length, int), 1 - group.rank, timeout=30) == number).all()
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
    for length in LENGTHS:
        for number in range(5):
            world.send(np.full(length, rank + number), (rank + 1) % n, timeout=30)
            assert (world.recv(np.zeros(length, int), (rank - 1) % n, timeout=30) == (rank - 1) % n + number).all()
    world.barrier()


def in_any_order(world: px.Group) -> None:
    """Some are waited for, some are not, and of tag 1 is asked first."""
    lengths = [*LENGTHS, 3] * 5
    world.barrier()
    if world.rank == 0:
        works = [world.isend(np.full(n, i), 1, tag=i % 2) for i, n in enumerate(lengths)]
        world.send(np.full(LENGTHS[0], -1), 1, timeout=30)
        for work in works:
            work.wait()
    elif world.rank == 1:
        for tag in (1, 0):
            for i in range(tag, len(lengths), 2):
                assert (world.recv(np.zeros(lengths[i], int), 0, tag=tag, timeout=30) == i).all()
        assert (world.recv(np.zeros(LENGTHS[0], int), 0, timeout=30) == -1).all()
    world.barrier()


def tensors(world: px.Group) -> None:
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    for shape in ((2, 3), (30, 100), (0,), ()):
        weights = torch.full(shape, 8.0, requires_grad=True)
        if world.rank == 0:
            for _ in range(3):
                world.send(weights, 1)
        elif world.rank == 1:
            out = torch.zeros(shape)
            assert world.recv(out, 0) is out
            assert (out == 8).all()
            made = world.recv(src=0)
            assert isinstance(made, torch.Tensor)
            assert made.shape == shape
            array = np.zeros(shape, np.float32)
            world.recv(array, 0)
            assert (array == 8).all()
        world.barrier()  # a rank that still receives takes in what comes next, too
    halves = torch.full((1000,), 0.5, dtype=torch.bfloat16)
    if world.rank == 0:
        with pytest.raises(px.Timeout):  # with a gradient, no array of NumPy can be made of it
            world.send(torch.ones(3000, requires_grad=True), 1, timeout=SOON)
    world.barrier()
    if world.rank == 0:
        world.send(halves, 1)
    elif world.rank == 1:
        assert (world.recv(torch.zeros(1000, dtype=torch.bfloat16), 0) == halves).all()
    world.barrier()


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Another process does nothing meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(0.1)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def a_body_that_comes_too_late_is_left_alone(world: px.Group) -> None:
    """The last of all: when a message is cut in the middle, no more can be sent to that rank."""
    pids = world.all_gather_object(os.getpid())
    late = np.zeros(LENGTHS[-1], int)
    work = world.isend(np.full(LENGTHS[-1], 9), 1, timeout=2) if world.rank == 0 else None
    world.barrier()
    if world.rank == 1:
        with stopped(pids[0]), pytest.raises(px.PhalanxError):
            world.recv(late, 0, timeout=LATE)
        time.sleep(0.5)
        assert not late.any()
        with pytest.raises(px.PhalanxError):
            world.recv(np.zeros(LENGTHS[-1], int), 0, timeout=LATE)
    world.barrier()
    if work is not None:
        with contextlib.suppress(px.PhalanxError):
            work.wait()


def main() -> None:
    with px.init("mpi", timeout=60) as world:
        world.barrier()
        for case in (
            the_core_moves_them,
            a_send_that_raised_is_never_received,
            a_receive_that_raised_takes_nothing,
            what_does_not_fit_is_written_nowhere,
            both_send_first,
            in_a_ring,
            in_any_order,
            tensors,
            a_body_that_comes_too_late_is_left_alone,
        ):
            began = time.monotonic()
            case(world)
            if world.rank == 0:
                print(f"{case.__name__}: {time.monotonic() - began:.1f} s", flush=True)
    print("all of them ran", flush=True)


if __name__ == "__main__":
    main()
