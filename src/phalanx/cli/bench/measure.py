"""Walks over all cells. In each the contenders take turns in short rounds: a noisy moment meets all of them."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import msgspec

from .contenders import Contender, Site
from .machine import MachineLimits
from .orders import CheckOrder, DropOrder, MemoryOrder, RunOrder
from .plan import BenchPlan, Cell, Entrant
from .results import CellResult, MemoryResult, Timing
from .sizes import show_seconds
from .summary import place
from .workers import BenchWorkers, WorkersFailed

__all__ = ["Measuring"]

_FEWEST = 3
"""Calls in a round, also of the largest arrays, and rounds in a cell, also of the slowest contender."""
_CHANCES = 2
"""How often the processes of a contender may fail at one number of ranks before it is left out."""
_MORE_TRIES = 5
"""How often a limit is tried again when a contender was faster."""
_EXACT = 0.97
"""A limit is a measurement, too: what comes this near to it does not prove it wrong."""
_NEAR = 1.5
"""Contenders nearer to the fastest one than this are not told apart by a few rounds: a core of a virtual machine may be
half as fast for a second, because others use it, too."""
_MORE = 3
"""So many times as many rounds those have then."""
_SLOW = 0.5
"""Seconds for a call that needs no second one to warm up."""


@dataclass(eq=False)
class _Racer:
    """An entrant in one cell."""

    entrant: Entrant
    workers: BenchWorkers
    iterations: int = 1
    rounds: int = 1
    times: list[float] = field(default_factory=list)
    error: str = ""


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """A second Ctrl-C does not keep the first one from ending everything."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


class Measuring:
    """One run, as it goes on.

    Args:
        plan: What to measure.
        site: Where.
        folder: For everything that processes need; removed by the caller afterwards.
        limits: Of this machine.
        step: Called with a cell before it is measured, and with a text before processes start.
        measured: Called after each cell.
    """

    def __init__(
        self,
        plan: BenchPlan,
        *,
        site: Site,
        folder: Path,
        limits: MachineLimits,
        step: Callable[[Cell | str], None],
        measured: Callable[[], None] = lambda: None,
    ) -> None:
        self._plan, self._site, self._folder, self._limits, self._step = plan, site, folder, limits, step
        self._measured = measured
        self._running: dict[str, BenchWorkers] = {}
        self._failures: dict[str, int] = {}
        self._started = 0
        self.cells: list[CellResult] = []
        self.memory: list[MemoryResult] = []
        self.errors: list[str] = []
        self.versions: dict[str, str] = {}
        self.ours_failed = False
        self.limit_broken = False

    def run(self) -> None:
        """Measures everything. Failures are noted, and the other contenders go on."""
        for ranks in self._plan.ranks:
            self._failures.clear()
            try:
                for contender in self._plan.contenders:
                    self._workers_of(contender, ranks)
                if self._plan.memory:
                    self._measure_memory(ranks)
                for cell in self._plan.cells(ranks):
                    self._step(cell)
                    self.cells.append(self._measure(cell))
                    self._measured()
                self._end_all(BenchWorkers.end)
            except BaseException:
                with _uninterrupted():
                    self._end_all(BenchWorkers.kill)
                raise

    # -- processes -----------------------------------------------------------------------------------------------------

    def _workers_of(self, contender: Contender, ranks: int) -> BenchWorkers | None:
        """The contender's processes, started if they are not there; None if they failed too often."""
        workers = self._running.get(contender.name)
        if workers is not None or self._failures.get(contender.name, 0) >= _CHANCES:
            return workers
        self._step(f"starting {contender.label} on {ranks} ranks")
        self._started += 1
        folder = self._folder / str(self._started)
        folder.mkdir()
        try:
            workers = BenchWorkers(contender, ranks, site=self._site, folder=folder, limit=self._plan.limit)
        except WorkersFailed as error:
            self._note(contender, str(error))
            return None
        self._running[contender.name] = workers
        self.versions[contender.name] = workers.version
        return workers

    def _note(self, contender: Contender, text: str) -> None:
        self._failures[contender.name] = self._failures.get(contender.name, 0) + 1
        self.ours_failed |= contender.is_ours
        self.errors.append(text)

    def _failed(self, workers: BenchWorkers, error: WorkersFailed) -> str:
        """Ends the processes, which are started again for the next cell. Returns the text for the table."""
        self._note(workers.contender, str(error))
        self._running.pop(workers.contender.name, None)
        workers.kill()
        return str(error).split("\n", 1)[0]

    def _end_all(self, how: Callable[[BenchWorkers], None]) -> None:
        while self._running:
            name, workers = next(reversed(self._running.items()))
            how(workers)
            del self._running[name]  # not before: a signal that comes meanwhile has them killed

    # -- one cell ------------------------------------------------------------------------------------------------------

    def _measure(self, cell: Cell) -> CellResult:
        timings: dict[str, Timing] = {}
        racers: list[_Racer] = []
        for entrant in self._plan.entrants(cell.operation):
            ready = self._prepare(cell, entrant)
            if isinstance(ready, Timing):
                timings[entrant.name] = ready
            else:
                racers.append(ready)
        self._try_limit(cell)
        self._race(racers)
        for racer in racers:
            name = racer.entrant.name
            times = [] if racer.error else [seconds / self._plan.parts(cell) for seconds in racer.times]
            timings[name] = Timing(name, times, racer.iterations, error=racer.error)
        for workers in list(self._running.values()):
            try:
                workers.ask(DropOrder())
            except WorkersFailed as error:
                self._failed(workers, error)
        order = [entrant.name for entrant in self._plan.entrants(cell.operation)]
        found = CellResult(**cell._asdict(), timings=[timings[name] for name in order], limit=self._try_limit(cell))
        return self._hold_to_limit(cell, found)

    def _try_limit(self, cell: Cell) -> float | None:
        """The least time of the cell by all tries, of which this is one more: before the race, and after it."""
        movement = self._plan.least(cell)
        return None if movement is None else self._limits.measure(movement, cell.ranks)

    def _hold_to_limit(self, cell: Cell, found: CellResult) -> CellResult:
        """The result, with a limit that no contender is below. If there is one still, the limit is wrong.

        A single round does not show that: it may have met a second in which a busy machine was quicker than in all
        tries.
        """
        fastest = min((timing.best for timing in found.timings if timing.best is not None), default=math.inf)
        for _ in range(_MORE_TRIES):
            if found.limit is None or fastest >= found.limit:
                return found
            # The machine may have been busy when it was tried.
            found = msgspec.structs.replace(found, limit=self._try_limit(cell))
        median = min((timing.seconds for timing in found.timings if timing.seconds is not None), default=math.inf)
        if found.limit is not None and median < _EXACT * found.limit:
            self.limit_broken = True
            self.errors.append(
                f"{place(found)} took {show_seconds(median)}, less than the limit of {show_seconds(found.limit)}: "
                "the limit is wrong"
            )
        return found

    def _prepare(self, cell: Cell, entrant: Entrant) -> _Racer | Timing:
        workers = self._workers_of(entrant.contender, cell.ranks)
        if workers is None:
            return Timing(entrant.name, error=f"{entrant.label} does not run on {cell.ranks} ranks here")
        racer = _Racer(entrant, workers)
        try:
            lacks = self._fill(racer, cell)
            if lacks:
                return Timing(entrant.name, lacks=lacks)
            workers.ask(CheckOrder(entrant.name))
            self._calibrate(racer)
        except WorkersFailed as error:
            return Timing(entrant.name, error=self._failed(workers, error))
        return racer

    def _fill(self, racer: _Racer, cell: Cell) -> str:
        """Has the ranks make the arrays. Returns the feature that the library lacks; empty if it lacks none."""
        answers = racer.workers.ask(self._plan.prepare(cell, racer.entrant))
        return next((answer.lacks for answer in answers if answer.lacks), "")

    def _calibrate(self, racer: _Racer) -> None:
        """Warms up, and chooses how many calls make a round."""
        plan = self._plan
        seconds = self._time(racer, 1)
        if seconds < _SLOW:
            seconds = self._time(racer, 2)
            calls = int(plan.round_seconds / 4 / seconds)
            if calls > 2:
                seconds = self._time(racer, min(calls, 2000))
        racer.iterations = self._calls_of_a_round(seconds)
        racer.rounds = max(_FEWEST, min(plan.rounds, int(plan.budget / racer.iterations / seconds)))

    def _calls_of_a_round(self, seconds: float) -> int:
        wanted = max(_FEWEST, round(self._plan.round_seconds / seconds))
        affordable = int(self._plan.budget / self._plan.rounds / seconds)
        return max(1, min(wanted, affordable))

    def _race(self, racers: list[_Racer]) -> None:
        self._take_turns(racers)
        going = [racer for racer in racers if not racer.error]
        fastest = min((median(racer.times) for racer in going), default=0.0)
        near = [racer for racer in going if median(racer.times) < _NEAR * fastest]
        if len({racer.entrant.contender.is_ours for racer in near}) == 2:
            for _ in range(_MORE - 1):
                self._take_turns(near)

    def _take_turns(self, racers: list[_Racer]) -> None:
        for turn in range(max((racer.rounds for racer in racers), default=0)):
            # Another one begins each time: what the one before leaves in the caches meets all of them.
            first = turn % len(racers)
            for racer in racers[first:] + racers[:first]:
                if racer.error or turn >= racer.rounds:
                    continue
                if self._running.get(racer.entrant.contender.name) is not racer.workers:
                    racer.error = "its processes were ended"
                    continue
                try:
                    racer.times.append(self._time(racer, racer.iterations))
                    # If it was calibrated in a slow moment, its rounds would be so short that a hiccup fills them.
                    racer.iterations = max(racer.iterations, self._calls_of_a_round(racer.times[-1]))
                except WorkersFailed as error:
                    racer.error = self._failed(racer.workers, error)

    def _time(self, racer: _Racer, iterations: int) -> float:
        """Seconds per call, of the slowest rank."""
        answers = racer.workers.ask(RunOrder(racer.entrant.name, iterations))
        return max(max(answer.seconds for answer in answers) / iterations, 1e-9)

    # -- memory --------------------------------------------------------------------------------------------------------

    def _measure_memory(self, ranks: int) -> None:
        """Measures processes that have done nothing else yet, so that memory for the first call counts, too."""
        cell = Cell("all_reduce", self._plan.dtypes[0], ranks, max(self._plan.sizes))
        self._step(f"memory of all_reduce on {ranks} ranks")
        for entrant in self._plan.entrants("all_reduce"):
            workers = self._running.get(entrant.contender.name)
            if workers is None or entrant.in_segment:  # its arrays are in memory that is there before the call
                continue
            try:
                if self._fill(_Racer(entrant, workers), cell):
                    continue
                found = [answer.memory for answer in workers.ask(MemoryOrder(entrant.name, _FEWEST)) if answer.memory]
                workers.ask(DropOrder())
            except WorkersFailed as error:
                self._failed(workers, error)
                continue
            peak, kept = max(usage.peak for usage in found), max(usage.kept for usage in found)
            self.memory.append(MemoryResult(entrant.name, ranks, cell.size, peak, kept))
