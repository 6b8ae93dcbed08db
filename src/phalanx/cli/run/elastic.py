"""The launcher of an elastic job: a rank that is lost does not end it, and another is started in its place."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from phalanx.launching.guardian import send

from .output import RankOutput
from .processes import LocalRank
from .report import describe_status
from .supervisor import Supervisor
from .world import WorldEnd

if TYPE_CHECKING:
    from phalanx.wire.control import Note

__all__ = ["ElasticSupervisor", "StartRank"]

StartRank = Callable[[int, int], tuple[LocalRank, tuple[RankOutput, RankOutput]]]
"""Starts a rank, by its place on this node and the number under which it joins."""


class ElasticSupervisor(Supervisor):
    """Runs a job whose world outlives its ranks.

    Until the world has formed, a rank that fails ends the job as any other. Then it is a loss: it is announced, and
    another rank is started, `max_restarts` times in all. Once a rank has ended well, the work is done: none is started
    any more, and one that fails by an error of its own has failed the job, as has the last one if it is lost. Ranks
    that join the world of another launcher are each lost for themselves, too.

    Args:
        start: Starts another rank.
        max_restarts: How often.
    """

    def __init__(self, *args: Any, start: StartRank, max_restarts: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self._start_rank = start
        self._max_restarts = max_restarts
        self._restarts = 0
        self._formed = self._plan.join is not None
        self._first_done: LocalRank | None = None
        """The first rank that has ended well."""
        self._over = ""
        """That no rank is left, in the words of the directory."""
        self._turned_away: set[int] = set()
        """Ranks that came to join and were not let in."""
        self._vacant: list[int] = []
        """Places on this node without a rank, because the job had enough of them."""
        self._lost_afar = 0
        """Ranks of other launchers that were lost, and for which none was started here."""
        self._voted_out: dict[LocalRank, float] = {}
        """Ranks of this node that the others go on without, and when they are killed if they have not ended."""
        self._places = {rank: place for place, rank in enumerate(self._by_rank)}
        self._next_number = self._plan.world_size

    def _take_mail(self, now: float) -> None:
        while self._mailbox.changes:
            self._take_change(self._mailbox.changes.popleft(), now)
        super()._take_mail(now)

    def _take_change(self, note: Note, now: float) -> None:
        if note.kind == "formed":
            self._formed = True
            return
        if note.kind == "over":
            self._over = note.text
            self._ending.all_lost(now)
            return
        if note.rank is not None:
            self._next_number = max(self._next_number, note.rank + 1)
            if note.kind == "turned away":
                self._turned_away.add(note.rank)
        mine = next((rank for rank in self._processes.ranks if rank.rank == note.rank), None)
        is_loss = note.kind in ("lost", "voted out")
        if note.kind in ("view", "turned away") or (is_loss and mine is None):
            self._say(note.text)
        if is_loss and mine is None:
            self._lost_afar += 1
            self._fill_vacancies()
        elif note.kind == "voted out" and mine is not None and mine.status is None:
            # It may be stopped, or wait for something that never comes. Other losses are seen when the process ends.
            self._voted_out[mine] = now + self._plan.grace
            self._replace(mine, note.text)

    def _ended_by_itself(self, rank: LocalRank, now: float) -> None:
        if rank.status == 0:
            self._first_done = self._first_done or rank
        if self._ending.reason is not None or not self._formed or rank.status == 0:
            super()._ended_by_itself(rank, now)
            return
        if rank in self._voted_out:
            del self._voted_out[rank]
            return
        if rank.rank in self._turned_away:  # it was never a part of the job
            self._by_rank.pop(rank)
            self._vacant.append(self._places.pop(rank))
            self._fill_vacancies()
            return
        left = [other for other in self._processes.running if other not in self._voted_out]
        failed = self._first_done is not None and (rank.status or 0) > 0
        if not left or failed:  # the state is gone with the last one, and so may be what was to come after the loop
            super()._ended_by_itself(rank, now)
            return
        self._show_last_words(rank, now)
        self._replace(rank, f"rank {rank.rank} was lost: {describe_status(rank.status or 0)}")

    def _replace(self, rank: LocalRank, lost: str) -> None:
        """Announces the loss of a rank, and starts another, if one may be."""
        self._by_rank.pop(rank, None)
        place = self._places.pop(rank)
        why_not = self._why_none_starts()
        if why_not is not None:
            left = sum(other not in self._voted_out for other in self._processes.running)
            self._say(f"{lost}; {left} of {self._plan.ranks} ranks are left, and none is started: {why_not}")
            return
        number = self._start_another(place)
        self._say(f"{lost}; starting rank {number} in its place ({self._restarts} of {self._max_restarts} restarts)")

    def _next_step(self) -> float:
        return min([super()._next_step(), *self._voted_out.values()])

    def _step(self, now: float) -> None:
        for rank, at in self._voted_out.items():
            if at <= now:
                self._say(f"rank {rank.rank} was voted out and has not ended within {self._plan.grace:g} s: killing it")
                send(signal.SIGKILL, [rank.pid])
                self._voted_out[rank] = math.inf
        super()._step(now)

    def _fill_vacancies(self) -> None:
        while self._vacant and self._lost_afar and self._why_none_starts() is None:
            self._lost_afar -= 1
            number = self._start_another(self._vacant.pop())
            self._say(f"starting rank {number} in its place ({self._restarts} of {self._max_restarts} restarts)")

    def _why_none_starts(self) -> str | None:
        """Why no other rank is started any more; None if one may be."""
        if self._first_done is not None:
            return f"rank {self._first_done.rank} has ended well, so the work is done"
        if not self._world.serves:
            return "the directory is gone"
        if self._plan.join is not None:
            return "`phalanx join` starts each rank once"
        return None if self._restarts < self._max_restarts else "no restart is left"

    def _start_another(self, place: int) -> int:
        """Starts a rank; returns the number under which it joins."""
        self._restarts += 1
        number, self._next_number = self._next_number, self._next_number + 1
        self._world.reserve(number)
        started, outputs = self._start_rank(place, number)
        self._places[started] = place
        self._by_rank[started] = outputs
        self._outputs += outputs
        return number

    def _show_last_words(self, rank: LocalRank, now: float) -> None:
        """Shows the traceback that a lost rank has left; it has no part in how the job ends."""
        _, errors = self._by_rank[rank]
        words = self._processes.last_words(rank)
        if words is not None:
            errors.add(words.text, now, show=True)

    def _conclude(self) -> int:
        ending = self._ending
        if self._over and not ending.failed:  # one that was slow to end may have said what happened
            ending.failed = [rank for rank in self._by_rank if self._processes.last_words(rank) is not None]
        if self._over and ending.failed:
            self._say(self._over)
        elif self._over and ending.cause is None:
            ending.cause = WorldEnd(None, self._over)
        return super()._conclude()
