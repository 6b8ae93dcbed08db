"""What a rank does in `tests.soak.calls`: serves, calls, and compares what comes with what must come."""

from __future__ import annotations

import concurrent.futures
import gc
import itertools
import os
import random
import re
import signal
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import phalanx as px
from phalanx.errors import FunctionNotFound, InvalidArgument, PeerLost, RemoteError, Timeout
from phalanx.rpc import Agent, current_call

THREADS = 4
"""That call, on each rank."""
BATCH = 24
"""Calls that a thread has under way at most."""
WARM = 0.3
"""How many calls, compared with all, are made before the first look at what is held."""
OVER = "nobody waits any more"
PATIENCE = 60.0
"""Seconds that no call needs: on a machine with more ranks than cores, one may wait for its turn."""


def measure() -> dict[str, int]:
    """What this process holds."""
    gc.collect()
    resident = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert resident is not None
    return {
        "memory": int(resident[1]) << 10,
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": Path("/proc/self/maps").read_text().count("phalanx-ring"),
    }


# -- what is called --------------------------------------------------------------------------------------------------


class Served:
    """What a rank serves, and how often each call was run."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self.runs: Counter[tuple[int, int]] = Counter()
        self.twice = 0
        self.notified = 0
        for name in ("echo", "digest", "make", "nest", "fail", "slow", "items", "note"):
            agent.register(name, getattr(self, name))
        agent.register("soon", self.soon)
        agent.register("notified_so_far", lambda: self.notified)

    def _ran(self, number: int) -> None:
        """Each caller numbers its calls; no number may come twice."""
        context = current_call()
        assert context is not None
        with self._lock:
            key = (context.caller, number)
            self.runs[key] += 1
            self.twice += self.runs[key] > 1

    def echo(self, number: int, value: Any) -> Any:
        self._ran(number)
        return value

    async def soon(self, number: int, value: Any) -> Any:
        self._ran(number)
        return value

    def digest(self, number: int, array: np.ndarray[Any, Any]) -> list[int]:
        self._ran(number)
        return [array.nbytes, zlib.crc32(array)]

    def make(self, number: int, size: int) -> np.ndarray[Any, Any]:
        self._ran(number)
        return pattern(number, size)

    def nest(self, number: int, path: list[int], value: int) -> int:
        self._ran(number)
        if not path:
            return value
        deeper = next(_numbers)
        return self._agent.call(path[0], "nest", deeper, path[1:], value + 1)  # type: ignore[no-any-return]

    def fail(self, number: int, words: str) -> None:
        self._ran(number)
        raise LookupError(words)

    def slow(self, number: int, seconds: float) -> str:
        self._ran(number)
        context = current_call()
        assert context is not None
        end = time.monotonic() + seconds
        while not context.cancelled and time.monotonic() < end:
            time.sleep(0.0005)
        return OVER

    def items(self, number: int, count: int) -> Iterator[int]:
        self._ran(number)
        for item in range(count):
            yield number + item

    def note(self) -> None:
        with self._lock:
            self.notified += 1


def pattern(number: int, size: int) -> np.ndarray[Any, Any]:
    """Bytes that are different for each call."""
    return np.resize(np.frombuffer(number.to_bytes(8, "little") + b"phalanx", np.uint8), size)


_numbers = itertools.count(1)
"""Of all calls that this process makes: one that nobody waits for any more may still run after all others."""


# -- calls, and what must come of them -------------------------------------------------------------------------------


@dataclass
class Findings:
    """What became of the calls of a rank."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    notified: Counter[int] = field(default_factory=Counter)
    """Notifications by the rank that they were sent to."""
    losses: list[tuple[float, float]] = field(default_factory=list)
    """When a call that found its rank lost began and ended."""


@dataclass
class Expected:
    """A call under way."""

    kind: str
    dst: int
    began: float
    future: concurrent.futures.Future[Any]
    check: Callable[[Any], object]
    error: type[BaseException] | None = None
    path: tuple[int, ...] = ()
    """Other ranks that it goes through."""
    timeout: float = PATIENCE


class Caller:
    """One thread's calls.

    Args:
        victim: A rank that may be lost at any moment: then calls to it, or through it, may fail with that.
    """

    def __init__(self, agent: Agent, seed: str, findings: Findings, victim: int = -1) -> None:
        self._agent = agent
        self._random = random.Random(seed)
        self._findings = findings
        self._victim = victim
        self._under_way: deque[Expected] = deque()

    def step(self) -> None:
        """Makes one call of some kind; now and then looks at what came of those before."""
        kinds = (self._echo, self._array, self._nest, self._error, self._give_up, self._stream, self._note)
        (kind,) = self._random.choices(kinds, (45, 15, 10, 12, 8, 5, 5))
        try:
            kind(self._random.randrange(self._agent.world_size), next(_numbers))
        except PeerLost as error:
            self._lost("direct", time.monotonic(), error)
        while len(self._under_way) > self._random.randrange(BATCH):
            self.settle(self._under_way.popleft())

    def finish(self) -> None:
        """Waits for the rest."""
        while self._under_way:
            self.settle(self._under_way.popleft())

    def _start(
        self,
        dst: int,
        name: str,
        *args: Any,
        check: Callable[[Any], object],
        error: type[BaseException] | None = None,
        timeout: float = PATIENCE,
        path: tuple[int, ...] = (),
    ) -> Expected:
        began = time.monotonic()
        future = self._agent.call_async(dst, name, *args, timeout=timeout)
        started = Expected(name, dst, began, future, check, error, path, timeout)
        self._under_way.append(started)
        return started

    def settle(self, call: Expected) -> None:
        """Compares what a call came to with what it must."""
        found = self._findings
        try:
            value: Any = call.future.result(PATIENCE + 10)
        except concurrent.futures.CancelledError:
            error: BaseException | None = RuntimeError("cancelled by nobody") if call.error is None else call.error()
            name = "cancelled"
        except BaseException as raised:
            error, name = raised, type(raised).__name__
        else:
            error, name = None, "answered"
        if self._is_loss(call, error):
            assert error is not None
            self._lost(call.kind, call.began, error)
            return
        if call.error is Timeout and error is None and value == OVER:
            # It ended because its time was over, and its last word came before anybody here had looked at the clock.
            good = time.monotonic() - call.began >= call.timeout
        elif call.error is not None:
            good = isinstance(error, call.error) and bool(call.check(error))
        else:
            good = error is None and bool(call.check(value))
        found.outcomes[name] += 1
        if not good:
            expected = call.error.__name__ if call.error else "an answer"
            found.wrong.append(f"{call.kind} on rank {call.dst}: expected {expected}, got {name}: {error!r}"[:500])

    def _is_loss(self, call: Expected, error: BaseException | None) -> bool:
        if self._victim < 0 or error is None:
            return False
        if call.dst == self._victim:
            return isinstance(error, PeerLost)
        return self._victim in call.path and isinstance(error, RemoteError) and "raised PeerLost" in str(error)

    def _lost(self, kind: str, began: float, error: BaseException) -> None:
        self._findings.outcomes["lost"] += 1
        if isinstance(error, RemoteError):
            return
        if self._victim < 0 or getattr(error, "peer", None) != self._victim:
            self._findings.wrong.append(f"{kind}: {error!r}, but that rank is not lost")
        self._findings.losses.append((began, time.monotonic()))

    # -- kinds -------------------------------------------------------------------------------------------------------

    def _echo(self, dst: int, number: int) -> None:
        value: Any = self._random.choice(
            [number, str(number) * self._random.randrange(200), {"n": [number, None, 1.5]}, "x" * 70_000, b"b" * 20_000]
        )
        name = self._random.choice(["echo", "soon"])
        if self._random.random() < 0.3:
            began = time.monotonic()
            done: concurrent.futures.Future[Any] = concurrent.futures.Future()
            try:
                done.set_result(self._agent.call(dst, name, number, value, timeout=PATIENCE))
            except BaseException as error:
                done.set_exception(error)
            self.settle(Expected(name, dst, began, done, lambda answer: answer == value))
        else:
            self._start(dst, name, number, value, check=lambda answer: answer == value)

    def _array(self, dst: int, number: int) -> None:
        size = int(2 ** self._random.uniform(0, 21))
        if self._random.random() < 0.5:
            array = pattern(number, size)
            expected = [size, zlib.crc32(array)]
            self._start(dst, "digest", number, array, check=lambda answer: answer == expected)
        else:
            self._start(dst, "make", number, size, check=lambda answer: np.array_equal(answer, pattern(number, size)))

    def _nest(self, dst: int, number: int) -> None:
        path = [self._random.randrange(self._agent.world_size) for _ in range(self._random.randrange(1, 6))]
        self._start(dst, "nest", number, path, 0, check=lambda answer: answer == len(path), path=tuple(path))

    def _error(self, dst: int, number: int) -> None:
        kind = self._random.randrange(3)
        if kind == 0:
            words = f"oops {number}"
            self._start(dst, "fail", number, words, error=RemoteError, check=lambda error: words in str(error))
        elif kind == 1:
            self._start(dst, "nowhere", number, error=FunctionNotFound, check=lambda error: "nowhere" in str(error))
        else:
            self._start(dst, "make", number, "long", error=InvalidArgument, check=lambda error: "make" in str(error))

    def _give_up(self, dst: int, number: int) -> None:
        if self._random.random() < 0.5:
            timeout = self._random.uniform(0.0, 0.02)
            self._start(
                dst, "slow", number, 30.0, error=Timeout, timeout=timeout, check=lambda error: error.peer == dst
            )
            return
        call = self._start(dst, "slow", number, 30.0, error=concurrent.futures.CancelledError, check=lambda error: True)
        time.sleep(self._random.choice([0, 0, 0.0005, 0.002]))
        if not call.future.cancel() and call.future.exception() is None:
            self._findings.wrong.append("a call of 30 s is done before it was cancelled")

    def _stream(self, dst: int, number: int) -> None:
        count = self._random.choice([0, 1, 15, 16, 17, 50, 200])
        wanted = self._random.choice([count, count, count // 2])
        began = time.monotonic()
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            with self._agent.call(dst, "items", number, count, timeout=PATIENCE) as items:
                done.set_result(list(itertools.islice(items, wanted)))
        except BaseException as error:
            done.set_exception(error)
        expected = [number + item for item in range(wanted)]
        self.settle(Expected("items", dst, began, done, lambda answer: answer == expected))

    def _note(self, dst: int, _number: int) -> None:
        self._agent.notify(dst, "note", timeout=PATIENCE)
        self._findings.notified[dst] += 1
        self._findings.outcomes["notified"] += 1


def _in_threads(agent: Agent, seed: str, findings: list[Findings], victim: int, more: Callable[[int], bool]) -> None:
    """Calls in some threads, each of them as long as `more(calls so far)` holds."""

    def body(thread: int) -> None:
        caller = Caller(agent, f"{seed}/{agent.rank}/{thread}", findings[thread], victim)
        try:
            for done in itertools.count():
                if not more(done):
                    break
                caller.step()
            caller.finish()
        except BaseException as error:
            findings[thread].wrong.append(f"a thread ended with {error!r}")

    threads = [threading.Thread(target=body, args=(thread,)) for thread in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _merge(findings: list[Findings]) -> Findings:
    merged = Findings()
    for one in findings:
        merged.outcomes += one.outcomes
        merged.notified += one.notified
        merged.wrong += one.wrong
        merged.losses += one.losses
    return merged


def _under_way(agent: Agent) -> list[int]:
    """How many calls each link of this rank has on its list: those that it made, then those that it serves."""
    links = agent._connections
    return [len(link.calls) for link in links.callers.values()] + [len(link.served) for link in links.servers]


def _settled(before: dict[str, int], seconds: float) -> dict[str, int]:
    """What is held once idle threads have ended; they need a while."""
    end = time.monotonic() + seconds
    while True:
        now = measure()
        if time.monotonic() > end or all(now[name] <= before[name] for name in before if name != "memory"):
            return now
        time.sleep(0.2)


# -- the three runs --------------------------------------------------------------------------------------------------


def work(world: px.Group, calls: int, seed: str, settle: float) -> dict[str, Any]:
    """One rank's part of the calls; then waits for idle threads to end."""
    with Agent(world, workers=8, max_in_flight=256, timeout=PATIENCE) as agent:
        served = Served(agent)
        world.barrier(timeout=PATIENCE)
        share = max(1, calls // world.world_size // THREADS)
        begun = time.monotonic()
        parts: list[Findings] = []
        before: dict[str, int] = {}
        for part, count in (("warm", max(1, int(share * WARM))), ("rest", share)):
            findings = [Findings() for _ in range(THREADS)]
            _in_threads(agent, f"{seed}/{part}", findings, -1, lambda done, count=count: done < count)
            parts.append(_merge(findings))
            world.barrier(timeout=600)
            if part == "warm":
                begun = time.monotonic()
                served.runs.clear()  # it is not to be measured
                before = measure()
        seconds = time.monotonic() - begun
        found = _merge(parts)
        sent = world.all_gather_object(dict(found.notified))
        expected = sum(counts.get(world.rank, 0) for counts in sent)
        end = time.monotonic() + 10
        while served.notified < expected and time.monotonic() < end:
            time.sleep(0.01)
        if served.notified != expected:
            found.wrong.append(f"{served.notified} of {expected} notifications came")
        if served.twice:
            found.wrong.append(f"{served.twice} calls were run twice")
        served.runs.clear()
        # A server takes a call off its list after the answer was sent, or when it reads that the caller has given up.
        end = time.monotonic() + 10
        while any(_under_way(agent)) and time.monotonic() < end:
            time.sleep(0.01)
        if any(left := _under_way(agent)):
            found.wrong.append(f"calls are left in the links: {left}")
        after = _settled(before, settle)
        world.barrier(timeout=PATIENCE)
    return {
        "before": before,
        "after": after,
        "outcomes": dict(found.outcomes),
        "wrong": found.wrong[:20],
        "seconds": seconds,
        "calls": share * THREADS,
    }


def under_fire(world: px.Group, seed: str) -> dict[str, Any]:
    """One rank of a world in which another is killed under load."""
    chance = random.Random(seed)
    victim = chance.randrange(world.world_size)
    killer = chance.choice([rank for rank in range(world.world_size) if rank != victim])
    agent = Agent(world, workers=8, max_in_flight=256, timeout=PATIENCE)
    Served(agent)
    killed: list[float] = []
    agent.register("killed_at", lambda: killed[0])
    pids = world.all_gather_object(os.getpid())
    world.barrier()
    stop = time.monotonic() + 0.2 + chance.uniform(0, 0.5) + 1.0

    def kill() -> None:
        time.sleep(stop - 1.0 - time.monotonic())
        killed.append(time.monotonic())
        os.kill(pids[victim], signal.SIGKILL)

    if world.rank == killer:
        threading.Thread(target=kill).start()
    findings = [Findings() for _ in range(THREADS)]
    _in_threads(agent, seed, findings, victim, lambda _: time.monotonic() < stop)
    found = _merge(findings)
    at = agent.call(killer, "killed_at", timeout=10)
    # A call that was under way when the rank was killed counts from then on, a later one from when it was made.
    notices = [ended - max(began, at) for began, ended in found.losses]
    if not any(began < at for began, _ in found.losses):
        found.outcomes["nothing under way"] += 1
    time.sleep(max(0.0, stop + 1.5 - time.monotonic()))  # the others have settled all of theirs
    agent.close(drain=False)
    return {"notices": notices, "outcomes": dict(found.outcomes), "wrong": found.wrong[:20]}


def pour(world: px.Group, seconds: float) -> dict[str, Any]:
    """Rank 0 sends to rank 1 as quickly as it can, where each call takes two milliseconds."""
    with Agent(world, workers=2, max_queue=256, max_in_flight=256, timeout=PATIENCE) as agent:
        taken = 0
        lock = threading.Lock()

        def take(data: bytes) -> int:
            nonlocal taken
            time.sleep(0.002)
            with lock:
                taken += 1
            return len(data)

        agent.register(take)
        agent.register("taken", lambda: taken)
        agent.register("memory", lambda: measure()["memory"])
        world.barrier()
        samples: list[tuple[int, int]] = []
        sent = 0
        wrong: list[str] = []
        if world.rank == 0:
            chance = random.Random(1)
            end = time.monotonic() + seconds
            look_at = 0.0
            while time.monotonic() < end:
                data = chance.randbytes(int(2 ** chance.uniform(0, 16)))
                if chance.random() < 0.5:
                    agent.notify(1, "take", data)
                else:
                    agent.call_async(1, "take", data)
                sent += 1
                if time.monotonic() > look_at:
                    look_at = time.monotonic() + 0.25
                    samples.append((measure()["memory"], agent.call(1, "memory")))
            limit = time.monotonic() + PATIENCE
            while agent.call(1, "taken") < sent and time.monotonic() < limit:
                time.sleep(0.01)
            if (came := agent.call(1, "taken")) != sent:
                wrong.append(f"{came} of {sent} came")
        world.barrier(timeout=seconds + 2 * PATIENCE)
    return {"sent": sent, "samples": samples, "wrong": wrong}
