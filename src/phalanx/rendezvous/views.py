"""The next view of a group that has lost members: who is in it. Decisions only, no I/O.

A *view* is the members of a group, in order, with a number, its *epoch*. Only the directory decides on views, in one
thread, and it decides once for each group: the answer to a later question about the same group is that decision, or
that the rank was voted out. So no two views of one group can both be installed.

A view is decided when all members that are alive have asked for it. At the earliest deadline of those that have, the
others are voted out, if those that asked are at least half of the living; else all of them are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ..wire import control as say

__all__ = ["Decided", "Outcome", "Refusal", "Views"]


@dataclass(frozen=True)
class Decided:
    """A view that is installed with this decision."""

    base: bytes
    epoch: int
    members: list[int]
    joined: list[int]
    out: list[int]
    """Living members that were voted out."""
    lost: list[int]
    """Members that are gone."""
    is_world: bool


@dataclass(frozen=True)
class Refusal:
    """No view, for all that have asked."""

    context: bytes
    asked: list[int]
    reason: str
    missing: list[int]
    over: bool = False


@dataclass(frozen=True)
class LateMember:
    """A rank asked for a view that was decided without it."""

    rank: int
    context: bytes
    is_world: bool


Outcome = Decided | Refusal | LateMember


@dataclass
class _Request:
    """A view that is being asked for."""

    epoch: int
    members: tuple[int, ...]
    is_world: bool
    minimum: int = 1
    joins: bool = False
    asked: dict[int, float] = field(default_factory=dict)
    """The ranks that have asked, and their deadlines."""


class Views:
    """All views of one world, decided and asked for.

    Args:
        alive: Tells whether a rank is in the world, and not about to leave it.
    """

    def __init__(self, alive: Callable[[int], bool]) -> None:
        self._alive = alive
        self._requests: dict[bytes, _Request] = {}
        self._decided: dict[bytes, Decided] = {}
        """Never forgotten while the world lasts: a late member must not begin a second decision."""
        self._waiting: dict[int, float] = {}
        """The ranks that wait to join, and their deadlines."""

    @property
    def arrivals(self) -> int:
        """The number of ranks that wait to join the world."""
        return len(self._waiting)

    def next_deadline(self) -> float | None:
        """When `expire` has something to do; None if nobody waits."""
        times = [at for request in self._requests.values() for at in request.asked.values()]
        return min([*times, *self._waiting.values()], default=None)

    def ask(self, rank: int, asked: say.Regroup, now: float) -> list[Outcome]:
        """A member asks for the next view of its group, or a new rank for one of the world."""
        if not asked.context:
            self._waiting[rank] = now + asked.seconds
            return self._check_all()
        known = self._decided.get(asked.context)
        if known is not None:
            return [LateMember(rank, asked.context, known.is_world)]
        if rank not in asked.members:
            return [Refusal(asked.context, [rank], f"rank {rank} is not in that group", [])]
        request = self._requests.get(asked.context)
        if request is None:
            request = _Request(asked.epoch, tuple(asked.members), asked.is_world)
            self._requests[asked.context] = request
        elif (request.epoch, request.members) != (asked.epoch, tuple(asked.members)):
            return [Refusal(asked.context, [rank], "the others name other members of that group", [])]
        request.asked[rank] = now + asked.seconds
        request.minimum = max(request.minimum, asked.minimum)
        request.joins = request.joins or asked.joins
        return self._check(asked.context)

    def short_of(self, context: bytes) -> str | None:
        """In words, that all members that are alive have asked, but are too few; None if that is not so."""
        request = self._requests.get(context)
        if request is None or self._missing(request) or self._size(request) >= request.minimum:
            return None
        return f"{self._size(request)} of at least {request.minimum} ranks are left"

    def gone(self, rank: int) -> list[Outcome]:
        """A rank is lost, or has left."""
        self._waiting.pop(rank, None)
        for context, request in list(self._requests.items()):
            request.asked.pop(rank, None)
            if not request.asked:
                del self._requests[context]
        return self._check_all()

    def end(self, reason: str) -> list[Outcome]:
        """Turns the ranks away that wait to join: there is no other left."""
        waiting, self._waiting = list(self._waiting), {}
        return [Refusal(b"", waiting, reason, [], over=True)] if waiting else []

    def expire(self, now: float) -> list[Outcome]:
        """Decides what has waited for long enough."""
        outcomes: list[Outcome] = []
        for context, request in list(self._requests.items()):
            if request.asked and min(request.asked.values()) <= now:
                outcomes.append(self._decide_late(context, request))
        late = [rank for rank, at in self._waiting.items() if at <= now]
        for rank in late:
            del self._waiting[rank]
        if late:
            outcomes.append(Refusal(b"", late, "the others did not come to a point where a rank can join", []))
        return outcomes

    def _check_all(self) -> list[Outcome]:
        return [outcome for context in list(self._requests) for outcome in self._check(context)]

    def _check(self, context: bytes) -> list[Outcome]:
        """The decision, if all that are alive have asked and are enough."""
        request = self._requests.get(context)
        if request is None or self._missing(request) or self._size(request) < request.minimum:
            return []
        return [self._decide(context, request)]

    def _decide_late(self, context: bytes, request: _Request) -> Outcome:
        missing = self._missing(request)
        asked = len(request.asked)
        reason = ""
        if 2 * asked < asked + len(missing):
            reason = f"only {_ranks(request.asked)} asked for a view without {_ranks(missing)}, which are alive"
        else:
            reason = self.short_of(context) or ""
        if reason:
            del self._requests[context]
            return Refusal(context, list(request.asked), reason, missing)
        return self._decide(context, request)

    def _decide(self, context: bytes, request: _Request) -> Decided:
        members = [rank for rank in request.members if rank in request.asked]
        joined = self._take_in(request)
        out = self._missing(request)
        lost = [rank for rank in request.members if rank not in request.asked and rank not in out]
        decided = Decided(context, request.epoch + 1, members + joined, joined, out, lost, request.is_world)
        self._decided[context] = decided
        del self._requests[context]
        return decided

    def _take_in(self, request: _Request) -> list[int]:
        if not (request.joins and request.is_world):
            return []
        joined = sorted(self._waiting)
        self._waiting.clear()
        return joined

    def _missing(self, request: _Request) -> list[int]:
        return [rank for rank in request.members if rank not in request.asked and self._alive(rank)]

    def _size(self, request: _Request) -> int:
        return len(request.asked) + (len(self._waiting) if request.joins and request.is_world else 0)


def _ranks(ranks: Iterable[int]) -> str:
    listed = list(ranks)
    return f"{'rank' if len(listed) == 1 else 'ranks'} {', '.join(map(str, listed))}"
