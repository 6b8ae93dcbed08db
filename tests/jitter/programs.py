"""Small programs for a world of two or three ranks, each true to a seed, that check the failure contract to the letter.

All ranks draw from the same generator, so that they take the same decisions without a word. A program runs in a
sub-group of everybody, because it may break it; `world` stays whole and is where the ranks meet afterwards. What one
rank can see is asserted there. What only all of them together can tell is returned, for `judge`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import phalanx as px
from phalanx._native import core

Array = npt.NDArray[Any]

LIMIT = 20.0
"""Seconds that no operation here needs."""
SIZES = (1, 5, 61, 3_000, 9_000, 60_000)
"""Elements of an array: in a line, in a note, in a slot, in pieces."""
ONE_WAY = ("reduce", "broadcast", "gather", "scatter")
VERBS = (*ONE_WAY, "all_reduce", "all_gather", "reduce_scatter", "all_to_all")


class Attempt(NamedTuple):
    """How one collective ended on one rank, and when it began and ended there, on the machine's monotonic clock."""

    program: str
    ok: bool
    began: float
    ended: float
    one_way: bool


def run(world: px.Group, seed: int, only: str | None) -> list[Attempt]:
    """Runs the programs of a seed on this rank."""
    if core is not None and hasattr(core, "seed_jitter"):
        core.seed_jitter(seed * 16 + world.rank + 1)
    rng = random.Random(seed)
    names = [only] * 3 if only else rng.choices(list(PROGRAMS), k=5)
    attempts: list[Attempt] = []
    for name in names:
        with world.subgroup(range(world.world_size)) as group:
            attempts += PROGRAMS[name](world, group, random.Random(rng.random())) or []
            world.barrier(timeout=LIMIT)
    if only in (None, "killed") and rng.random() < 0.3:
        killed(world, rng)
    return attempts


def judge(results: list[list[Attempt]]) -> None:
    """Holds what the ranks of a world saw against each other: an operation ends alike on all of them.

    Where data goes one way, from or to a root, a rank that only sends does not wait for the others. But nobody succeeds
    who comes after another has given up.
    """
    for attempts in zip(*results, strict=True):
        raised = [rank for rank, attempt in enumerate(attempts) if not attempt.ok]
        if not raised or len(raised) == len(attempts):
            continue
        last = max(range(len(attempts)), key=lambda rank: attempts[rank].began)
        first_end = min(attempts[rank].ended for rank in raised)
        if attempts[last].one_way and not any(attempt.ok and attempt.began > first_end for attempt in attempts):
            continue
        how = "succeeded" if attempts[last].ok else "raised"
        words = f"{attempts[last].program} raised on ranks {raised} of {len(attempts)} only"
        raise AssertionError(f"{words}; rank {last} came last and {how}")


# -- right data --------------------------------------------------------------------------------------------------------


def some_array(group: px.Group, rng: random.Random, size: int) -> Array:
    """Zeros, in the program's memory or in the segment."""
    array = group.empty(size, np.float64) if rng.random() < 0.6 else np.empty(size)
    array[:] = 0
    return array


class Collective:
    """One call of a random verb: the arrays of this rank, the call, and what must have come of it."""

    def __init__(self, group: px.Group, rng: random.Random) -> None:
        n, me, size = group.world_size, group.rank, rng.choice(SIZES)
        verb = rng.choice(VERBS)
        root, base = rng.randrange(n), rng.randrange(100)
        self.name = f"{verb} of {size}"
        self.one_way = verb in ONE_WAY
        self.x = some_array(group, rng, size * n if verb in ("scatter", "reduce_scatter", "all_to_all") else size)
        self.out = self.x
        each = np.arange(n) + base
        self.x[:] = each[me]
        result: Array
        if verb == "all_reduce":
            self.call = lambda timeout: group.all_reduce(self.x, timeout=timeout)
            result = np.full(size, each.sum())
        elif verb == "reduce":
            self.call = lambda timeout: group.reduce(self.x, root, timeout=timeout)
            result = np.full(size, each.sum() if me == root else each[me])
        elif verb == "broadcast":
            self.call = lambda timeout: group.broadcast(self.x, root, timeout=timeout)
            result = np.full(size, each[root])
        elif verb == "gather":
            self.out = some_array(group, rng, size * n)
            self.call = lambda timeout: group.gather(self.x, root, self.out if me == root else None, timeout=timeout)
            result = np.repeat(each, size) if me == root else np.zeros(size * n)
        elif verb == "scatter":
            self.out = some_array(group, rng, size)
            self.x[:] = np.repeat(each, size)
            self.call = lambda timeout: group.scatter(self.x if me == root else None, root, self.out, timeout=timeout)
            result = np.full(size, each[me])
        elif verb == "reduce_scatter":
            self.out = some_array(group, rng, size)
            self.call = lambda timeout: group.reduce_scatter(self.x, out=self.out, timeout=timeout)
            result = np.full(size, each.sum())
        else:
            self.out = some_array(group, rng, size * n)
            call = group.all_gather if verb == "all_gather" else group.all_to_all
            self.call = lambda timeout: call(self.x, out=self.out, timeout=timeout)
            result = np.repeat(each, size)
        self.result = result

    def check(self) -> None:
        wrong = np.flatnonzero(self.out != self.result)
        assert wrong.size == 0, f"{self.name}: {wrong.size} wrong, at {wrong[0]} {self.out[wrong[0]]}"


def plain(world: px.Group, group: px.Group, rng: random.Random) -> None:
    """Collectives one after the other, some of them asynchronous; every array is used again at once."""
    for _ in range(12):
        collective = Collective(group, rng)
        collective.call(None)
        collective.check()
        collective.x[:] = collective.out[:] = -1
        if rng.random() < 0.3:
            works = [group.all_reduce(np.full(7, group.rank + k), async_op=True) for k in range(3)]
            ranks = sum(range(group.world_size))
            assert [int(work.wait()[0]) for work in works] == [ranks + k * group.world_size for k in range(3)]


def threads(world: px.Group, group: px.Group, rng: random.Random) -> None:
    """Two threads with a collective each, issued in the same order everywhere: the second while the first waits."""
    group.barrier()  # makes the segment
    for _ in range(4):
        late, seconds = rng.randrange(group.world_size), rng.random() * 0.004
        guarded = [Guarded(group, rng) for _ in range(2)]
        if group.rank == late:
            time.sleep(seconds)
        before = sequence(group)
        errors: list[BaseException] = []
        first = threading.Thread(target=noting(errors, guarded[0].call))
        first.start()
        wait_until(lambda: errors or sequence(group) > before)  # noqa: B023
        second = threading.Thread(target=noting(errors, guarded[1].call))
        second.start()
        for thread in (first, second):
            thread.join(LIMIT)
            assert not thread.is_alive(), "a collective hangs"
        if errors:
            raise errors[0]
        for one in guarded:
            one.check()


class Guarded:
    """An all_gather or all_to_all, with memory behind its result that nobody may touch."""

    def __init__(self, group: px.Group, rng: random.Random) -> None:
        n, size = group.world_size, rng.choice((1, 40, 4_000))
        self.memory = np.full(20_000, -7.0)
        self.end = size * n
        gathers = rng.random() < 0.5
        x = np.full(size if gathers else size * n, group.rank, float)
        verb = group.all_gather if gathers else group.all_to_all
        self.call = lambda: verb(x, out=self.memory[: self.end])
        self.result = np.repeat(np.arange(n), size)

    def check(self) -> None:
        assert (self.memory[self.end :] == -7).all(), "a collective wrote behind its array"
        assert (self.memory[: self.end] == self.result).all(), "wrong data"


def messages(world: px.Group, group: px.Group, rng: random.Random) -> None:
    """Messages to the next rank; what was sent is changed at once."""
    n, me = group.world_size, group.rank
    x = np.empty(rng.choice((1, 300, 20_000, 200_000)), np.int64)
    for number in range(10):
        way = rng.random()
        x[:] = number * 10 + me
        work = group.isend(x, (me + 1) % n)
        got = group.recv(None if way < 0.5 else np.empty_like(x), (me - 1) % n)
        work.wait()
        x[:] = -1
        assert (got == number * 10 + (me - 1) % n).all(), "wrong data"


def calls(world: px.Group, group: px.Group, rng: random.Random) -> None:
    """Remote calls whose handler returns the same memory every time, and changes it in the next call."""
    memory = np.zeros(rng.choice((1_000, 100_000, 600_000)), np.int64)

    def count() -> Array:
        memory[:] += 1
        return memory

    with px.rpc.Agent(group, workers=1) as agent:
        agent.register(count)
        group.barrier()
        if group.rank == 0:
            futures = [agent.call_async(1, "count") for _ in range(rng.randrange(2, 7))]
            if rng.random() < 0.5:
                time.sleep(rng.random() * 0.01)
            for number, future in enumerate(futures, 1):
                got = future.result(LIMIT)
                assert (got == number).all(), f"result {number} holds {got.min()} to {got.max()}"
        world.barrier(timeout=LIMIT)


# -- failures ----------------------------------------------------------------------------------------------------------


def late(world: px.Group, group: px.Group, rng: random.Random) -> list[Attempt]:
    """A rank comes about when the others give up, and several times so."""
    attempts = [late_once(world, group, rng)]
    for _ in range(3):
        with world.subgroup(range(world.world_size)) as another:
            attempts.append(late_once(world, another, rng))
    return attempts


def late_once(world: px.Group, group: px.Group, rng: random.Random) -> Attempt:
    collective = Collective(group, rng)
    patience, who = rng.uniform(0.004, 0.02), rng.randrange(group.world_size)
    delay = patience * rng.choice((0.9, 1.0, 1.1, 1.5, 3.0))
    hears = rng.random() < 0.5
    group.barrier(timeout=LIMIT)
    if group.rank == who and hears:
        time.sleep(delay)
    elif group.rank == who:
        ctypes.PyDLL(None).usleep(int(delay * 1e6))  # holds the GIL: so nobody can tell this rank that others gave up
    began = time.monotonic()
    try:
        collective.call(patience)
        ok = True
    except px.PhalanxError:
        ok = False
    ended = time.monotonic()
    if ok:
        result = collective.out.copy()
    else:
        collective.x[:] = collective.out[:] = 7  # the call has failed: they are the program's again
    world.barrier(timeout=LIMIT)
    if ok:
        assert (result == collective.result).all(), f"{collective.name}: it returned, with wrong data"
    else:
        for array in (collective.x, collective.out):
            assert (array == 7).all(), f"{collective.name}: written to after the call had raised"
    return Attempt(f"late: {collective.name}", ok, began, ended, collective.one_way)


def killed(world: px.Group, rng: random.Random) -> None:
    """A rank is killed in the middle of collectives: the others hear of it, and their memory stays theirs."""
    who, seconds = rng.randrange(world.world_size), rng.random() * 0.02
    array = some_array(world, rng, rng.choice(SIZES))
    world.barrier()
    if world.rank == who:
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    began = time.monotonic()
    with contextlib.suppress(px.PeerLost):
        while time.monotonic() < began + LIMIT:
            array[:] = 1
            world.all_reduce(array)
            assert (array == world.world_size).all(), "wrong data"
        raise AssertionError("nobody said that a rank is lost")
    array[:] = 7
    time.sleep(0.01)
    assert (array == 7).all(), "written to after the call had raised"


PROGRAMS: dict[str, Callable[..., list[Attempt] | None]] = {
    "plain": plain,
    "threads": threads,
    "messages": messages,
    "calls": calls,
    "late": late,
}


# -- small things ------------------------------------------------------------------------------------------------------


def sequence(group: px.Group) -> int:
    """How many collectives were issued on this rank."""
    recorder = group._recorder
    assert recorder is not None
    return recorder.sequence


def noting(errors: list[BaseException], call: Callable[[], Any]) -> Callable[[], None]:
    def body() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    return body


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0)
