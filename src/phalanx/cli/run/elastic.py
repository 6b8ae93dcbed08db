"""The launcher of an elastic job: a rank that is lost does not end it, and another is started in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .output import RankOutput
from .processes import LocalRank
from .report import describe_status
from .supervisor import Supervisor
from .world import WorldEnd

__all__ = ["ElasticSupervisor", "StartRank"]

StartRank = Callable[[int, int], tuple[LocalRank, tuple[RankOutput, RankOutput]]]
"""Starts a rank, by its place on this node and the number under which it joins."""


class ElasticSupervisor(Supervisor):
    """Runs a job whose world outlives its ranks.

    Until the world has formed, a rank that fails ends the job as any other. Then it is a loss: it is announced, and
    another rank is started, `max_restarts` times in all. The job has failed when the last rank is gone and none has
    ended well.

    Args:
        start: Starts another rank.
        max_restarts: How often.
    """

    def __init__(self, *args: Any, start: StartRank, max_restarts: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self._start_rank = start
        self._max_restarts = max_restarts
        self._restarts = 0
        self._formed = False
        self._done = False
        """True once a rank has ended well: then the work is done, and no other is started."""
        self._places = {rank: place for place, rank in enumerate(self._by_rank)}
        self._next_number = self._plan.world_size

    def _take_mail(self, now: float) -> None:
        while self._mailbox.changes:
            note = self._mailbox.changes.popleft()
            if note.kind == "formed":
                self._formed = True
                continue
            if note.kind == "over":
                if self._ending.world_ended(WorldEnd(None, note.text), now, None):
                    self._announce(note.text)
                continue
            if note.rank is not None:
                self._next_number = max(self._next_number, note.rank + 1)
            mine = any(rank.rank == note.rank for rank in self._processes.ranks)
            if note.kind == "view" or not mine:  # what happens to the ranks of this node is seen here
                self._say(note.text)
        super()._take_mail(now)

    def _ended_by_itself(self, rank: LocalRank, now: float) -> None:
        if rank.status == 0:
            self._done = True
        if self._ending.reason is not None or not self._formed or rank.status == 0:
            super()._ended_by_itself(rank, now)
            return
        if self._done:
            return  # it came too late to join those that are done
        left = self._processes.running
        may_start = self._restarts < self._max_restarts and self._world.serves
        if not left:  # with it, the state is gone
            super()._ended_by_itself(rank, now)
            return
        self._show_last_words(rank, now)
        place = self._places.pop(rank)
        lost = f"rank {rank.rank} was lost: {describe_status(rank.status or 0)}"
        if not may_start:
            why = "no restart is left" if self._world.serves else "the directory is gone"
            self._say(f"{lost}; {len(left)} of {self._plan.ranks} ranks are left, and none is started: {why}")
            return
        self._restarts += 1
        number, self._next_number = self._next_number, self._next_number + 1
        self._say(f"{lost}; starting rank {number} in its place ({self._restarts} of {self._max_restarts} restarts)")
        started, outputs = self._start_rank(place, number)
        self._places[started] = place
        self._by_rank[started] = outputs
        self._outputs += outputs

    def _show_last_words(self, rank: LocalRank, now: float) -> None:
        """Shows the traceback that a lost rank has left; it has no part in how the job ends."""
        _, errors = self._by_rank.pop(rank)
        words = self._processes.last_words(rank)
        if words is not None:
            errors.add(words.text, now, show=True)
