"""Runs the schedules of all ranks against each other in memory, and says what went wrong or what it cost.

There are no threads and no time: a random but repeatable order decides which message is delivered next. So a result
that depends on the order differs from seed to seed, and a world in which no message can be delivered is a deadlock.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.algorithms import Recv, Schedule, Send, chunk_bounds

Array = npt.NDArray[Any]
SIZES = range(1, 65)
MANY = 24
SOME_SIZES = (*range(1, MANY + 1), 31, 32, 33, 47, 48, 63, 64)
"""All of the small ones, and the large ones around a power of two and halfway between two of them."""


def every_size(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a test for each of `SIZES`: one test per size would cost more than what it runs."""
    return _for_each(SIZES, test)


def some_sizes(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a test for each of `SOME_SIZES`: what runs the same schedules several times, whose results others check."""
    return _for_each(SOME_SIZES, test)


def _for_each(sizes: Iterable[int], test: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(test)
    def run_all(**arguments: Any) -> None:
        for size in sizes:
            test(size=size, **arguments)

    taken = inspect.signature(test)
    others = [parameter for name, parameter in taken.parameters.items() if name != "size"]
    run_all.__signature__ = taken.replace(parameters=others)  # type: ignore[attr-defined]
    return run_all


class Deadlock(AssertionError):
    """Ranks wait, and none of them can go on."""


class Unmatched(AssertionError):
    """A message was sent that nobody received, or both sides disagree on what it is."""


@dataclass
class Report:
    """What a run cost, by rank where it is a list."""

    rounds: int
    """Messages one after another on the longest path; those that one step sends or receives count as one."""
    sent: list[int]
    received: list[int]
    """Bytes."""
    messages: list[int]
    """Messages sent."""
    heard: list[int]
    """The ranks whose start happened before this rank's end, as bits: 1 << rank."""


@dataclass(slots=True)
class _Rank:
    number: int
    schedule: Schedule
    buffer: Array
    heard: int
    learned: int = 0
    """Heard within the current step: what the same step sends cannot depend on it."""
    late: list[tuple[Recv, Array]] = field(default_factory=list)
    """Reductions that wait for the end of the step, with what was received."""
    step: int = -1
    pending: int = 0
    started: int = 0
    finished: int = 0
    sent: int = 0
    received: int = 0
    messages: int = 0


@dataclass(slots=True)
class _Message:
    send: Send
    payload: Array
    nbytes: int
    heard: int
    started: int


@dataclass(slots=True)
class _Channel:
    """One direction between two ranks: what was offered and what is wanted, each in order."""

    source: _Rank
    target: _Rank
    offered: deque[_Message] = field(default_factory=deque)
    wanted: deque[Recv] = field(default_factory=deque)


def simulate(
    schedules: Sequence[Schedule],
    buffers: Array,
    *,
    op: Callable[..., Any] = np.add,
    buffered: bool = False,
    seed: int = 0,
) -> Report:
    """Runs to the end, changing `buffers` in place.

    Args:
        schedules: One for each rank.
        buffers: One row for each rank.
        op: A NumPy ufunc, called as `op(mine, received, out=mine)`, or the other way round.
        buffered: A send ends when it is posted, with a copy of the data. Otherwise it is synchronous: it ends when it
            is received, and reads the buffer as late as that.
        seed: Of the order in which messages are delivered.

    Raises:
        Deadlock: A rank cannot finish.
        Unmatched: A message was not received, or was expected as another chunk.
    """
    world = _World(schedules, buffers, op, buffered, random.Random(seed))
    return world.run()


class _World:
    def __init__(
        self,
        schedules: Sequence[Schedule],
        buffers: Array,
        op: Callable[..., Any],
        buffered: bool,
        order: random.Random,
    ) -> None:
        (parts,) = {schedule.parts for schedule in schedules}
        bounds = chunk_bounds(buffers.shape[1], parts)
        self.slices = [slice(*bound) for bound in bounds]
        self.nbytes = [(stop - start) * buffers.itemsize for start, stop in bounds]
        """By chunk, as the slices: an array takes longer to say it."""
        pairs = enumerate(zip(schedules, buffers, strict=True))
        self.ranks = [_Rank(i, schedule, buffer, 1 << i) for i, (schedule, buffer) in pairs]
        self.channels: dict[tuple[int, int], _Channel] = {}
        self.ready: list[_Channel] = []
        """A channel stands here once for each message that can be delivered."""
        self.op = op
        self.buffered = buffered
        self.order = order

    def run(self) -> Report:
        for rank in self.ranks:
            self.advance(rank)
        ready, any_number = self.ready, self.order.random
        while ready:
            # Take any: the last one takes its place, so that a long list costs nothing.
            index = int(any_number() * len(ready))
            taken, ready[index] = ready[index], ready[-1]
            ready.pop()
            self.deliver(taken)
        stuck = [rank for rank in self.ranks if rank.pending]
        if stuck:
            raise Deadlock("; ".join(f"rank {r.number} in {r.schedule.steps[r.step]}" for r in stuck))
        for (source, target), channel in self.channels.items():
            if channel.offered:
                raise Unmatched(f"rank {target} never received {channel.offered[0].send} from rank {source}")
        return Report(
            rounds=max(rank.finished for rank in self.ranks),
            sent=[rank.sent for rank in self.ranks],
            received=[rank.received for rank in self.ranks],
            messages=[rank.messages for rank in self.ranks],
            heard=[rank.heard for rank in self.ranks],
        )

    def advance(self, rank: _Rank) -> None:
        """Enters the next steps, for as long as nothing has to be waited for."""
        buffered, steps, channels = self.buffered, rank.schedule.steps, self.channels
        while rank.pending == 0 and rank.step + 1 < len(steps):
            rank.step += 1
            rank.started = rank.finished
            step = steps[rank.step]
            sends, recvs = step.sends, step.recvs
            rank.pending = len(recvs) + (0 if buffered else len(sends))
            if buffered and sends:
                rank.finished += 1
            rank.messages += len(sends)
            for send in sends:
                chunk = send.chunk
                nbytes = self.nbytes[chunk]
                rank.sent += nbytes
                data = rank.buffer[self.slices[chunk]]
                payload = data.copy() if buffered else data
                channel = channels.get((rank.number, send.peer)) or self.channel(rank.number, send.peer)
                channel.offered.append(_Message(send, payload, nbytes, rank.heard, rank.started))
                if len(channel.offered) <= len(channel.wanted):
                    self.ready.append(channel)
            for recv in recvs:
                channel = channels.get((recv.peer, rank.number)) or self.channel(recv.peer, rank.number)
                channel.wanted.append(recv)
                if len(channel.wanted) <= len(channel.offered):
                    self.ready.append(channel)

    def deliver(self, channel: _Channel) -> None:
        message, recv = channel.offered.popleft(), channel.wanted.popleft()
        source, target = channel.source, channel.target
        if message.send.chunk != recv.chunk:
            raise Unmatched(f"rank {source.number} sent {message.send}, but rank {target.number} expected {recv}")
        if recv.late:
            target.late.append((recv, message.payload.copy()))
        elif recv.reduce:
            self.reduce(target, recv, message.payload)
        elif message.nbytes:
            target.buffer[self.slices[recv.chunk]] = message.payload
        target.received += message.nbytes
        target.learned |= message.heard
        now = (message.started if message.started > target.started else target.started) + 1
        self.complete(target, now)
        if not self.buffered:
            self.complete(source, now)

    def complete(self, rank: _Rank, now: int) -> None:
        if now > rank.finished:
            rank.finished = now
        rank.pending -= 1
        if rank.pending == 0:
            rank.heard |= rank.learned
            for recv, payload in rank.late:
                self.reduce(rank, recv, payload)
            rank.late.clear()
            self.advance(rank)

    def reduce(self, rank: _Rank, recv: Recv, received: Array) -> None:
        mine = rank.buffer[self.slices[recv.chunk]]
        operands = (received, mine) if recv.before else (mine, received)
        self.op(*operands, out=mine)

    def channel(self, source: int, target: int) -> _Channel:
        """A new one."""
        made = self.channels[source, target] = _Channel(self.ranks[source], self.ranks[target])
        return made


def counts(size: int) -> list[int]:
    """None, fewer than the ranks, as many, and a number that the size does not divide (unless it is 1).

    For many ranks the last one alone, which has everything that the others have but emptiness.
    """
    return sorted({0, size - 1, size, 2 * size + 1}) if size <= MANY else [2 * size + 1]


def integers(size: int, count: int) -> Array:
    """A row for each rank whose sums are exact and tell which ranks are in them."""
    return np.random.default_rng([size, count]).integers(-(1 << 40), 1 << 40, (size, count))


def wild_floats(size: int, count: int) -> Array:
    """A row of float32 for each rank, of magnitudes so far apart that the order of a sum shows in its bits."""
    rng = np.random.default_rng([size, count])
    magnitudes = 10.0 ** rng.integers(-30, 30, (size, count))
    return (rng.uniform(-1, 1, (size, count)) * magnitudes).astype(np.float32)


def check_overlap(schedule: Schedule) -> None:
    """No step writes a chunk twice, or, unless it is late, one that it also sends; no step is empty; chunks exist."""
    for step in schedule.steps:
        assert step.sends or step.recvs
        sent = {send.chunk for send in step.sends}
        written = set()
        for recv in step.recvs:
            assert recv.chunk not in written, step
            assert recv.late or recv.chunk not in sent, step
            assert recv.reduce or not (recv.late or recv.before), step
            written.add(recv.chunk)
        assert all(0 <= chunk < schedule.parts for chunk in sent | written), step
