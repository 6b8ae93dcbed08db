"""The launcher's loop: it reads the ranks' output, notices their ends, and ends the job. One thread."""

from __future__ import annotations

import math
import selectors
import signal
import socket
import time

from phalanx.last_words import LastWords
from phalanx.launching.guardian import end_all, send

from .ending import Ending, Reason
from .events import LauncherMailbox, Signals
from .monitor import JobMonitor
from .output import Console, RankOutput
from .plan import RunPlan
from .processes import LocalRank, Processes
from .report import LEFT, RAISED, TRACEBACK, describe_status, last_words, list_ranks
from .upstream import Upstream
from .verdict import BROKEN_PIPE, Verdict, lost_silently
from .world import LaunchedWorld, WorldEnd
from .writer import OutputWriter

__all__ = ["Supervisor"]

LOOK = 0.05
"""Seconds between two looks for processes that are still there after their ranks."""
ASK = 0.1
"""Seconds between two looks whether other nodes still need this one."""
WAITING_AFTER = 5.0
"""Seconds after which the launcher says that it waits for other nodes."""
LAST_FLUSH = 0.5
"""Seconds that a job that was told to end waits for its output to be read."""


class Supervisor:
    """Runs a job from the moment its ranks are started.

    Args:
        plan: What runs.
        processes: The ranks, started.
        outputs: For each rank its standard output and error.
        upstream: Hears of the end instead of the person at this terminal.
        monitor: Watches the job, and has the last word on who made whom wait.
    """

    def __init__(
        self,
        plan: RunPlan,
        processes: Processes,
        outputs: dict[LocalRank, tuple[RankOutput, RankOutput]],
        *,
        console: Console,
        writer: OutputWriter,
        world: LaunchedWorld,
        mailbox: LauncherMailbox,
        signals: Signals,
        upstream: Upstream | None = None,
        monitor: JobMonitor | None = None,
    ) -> None:
        self._plan = plan
        self._upstream = upstream
        self._monitor = monitor
        self._processes = processes
        self._by_rank = outputs
        self._outputs = [output for pair in outputs.values() for output in pair]
        self._console = console
        self._writer = writer
        self._world = world
        self._mailbox = mailbox
        self._signals = signals
        self._ending = Ending(plan.grace)
        self._host = plan.names[plan.node] if plan.names else socket.gethostname()
        self._spared: LocalRank | None = None
        """The rank that is to blame and gets the time to end by itself, so that its exit code is its own."""
        self._stubborn: set[LocalRank] = set()
        """Ranks that were killed after the grace period."""
        self._announced = False
        self._killed = False
        self._look_at = 0.0
        self._done_at = math.inf
        self._said_waiting = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(mailbox.descriptor, selectors.EVENT_READ, None)
        self._reading: set[RankOutput] = set()

    # -- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Runs until the job has ended; returns the launcher's exit code."""
        try:
            finished = False
            while not finished:
                self._wait()
                now = time.monotonic()
                self._take_signals(now)
                self._take_mail(now)
                self._reap(now)
                self._step(now)
                finished = self._finished(now)
            return self._conclude()
        finally:
            self._selector.close()

    @property
    def failed(self) -> bool:
        """True if the job has ended because a rank failed."""
        return self._ending.reason is Reason.FAILURE

    def _wait(self) -> None:
        """Waits for the next event, and reads what the ranks wrote."""
        self._choose_what_to_read()
        wake_at = min((output.stream.due() for output in self._outputs if not output.closed), default=math.inf)
        wake_at = min(wake_at, self._next_step(), self._look_at if not self._processes.running else math.inf)
        now = time.monotonic()
        ready = self._selector.select(None if wake_at == math.inf else max(0.0, wake_at - now))
        now = time.monotonic()
        for key, _ in ready:
            if key.data is None:
                self._mailbox.clear()
            elif not self._writer.full:
                key.data.read(now)
        for output in self._outputs:
            if not output.closed and output.stream.due() <= now:
                output.stream.flush(now)

    def _choose_what_to_read(self) -> None:
        """Stops reading while the writer cannot keep up: then the ranks wait, and nothing piles up here."""
        wanted = set() if self._writer.full else {output for output in self._outputs if not output.closed}
        for output in self._reading - wanted:
            self._selector.unregister(output.descriptor)
        for output in wanted - self._reading:
            self._selector.register(output.descriptor, selectors.EVENT_READ, output)
        self._reading = wanted

    def _take_signals(self, now: float) -> None:
        while self._signals.arrived:
            number = self._signals.arrived.popleft()
            if number in Signals.FORWARDED:
                self._processes.forward(number)
                continue
            if self._ending.reason is None:
                name = signal.Signals(number).name
                self._announce(f"got {name}")
                where = f"node {self._plan.node} ({self._host})"
                self._tell_nodes(self._plan.first_rank, f"the launcher of {where} got {name}")
            self._ending.told(number, now)

    def _take_notes(self) -> None:
        while self._mailbox.notes:
            self._console.err.say(self._mailbox.notes.popleft())

    def _take_mail(self, now: float) -> None:
        self._take_notes()
        while self._mailbox.ends:
            end = self._mailbox.ends.popleft()
            local = next((rank for rank in self._processes.ranks if rank.rank == end.rank), None)
            # A rank of this node that was lost without a word has most likely ended, and how is soon known.
            if self._ending.world_ended(end, now, local) and (end.aborted or local is None):
                self._announce(self._who(end), end.rank)
        for descriptor, error in self._writer.failures():
            path = self._console.is_log(descriptor)
            if path is None:
                self._ending.output_closed(now)
            else:
                self._say(f"log file {path} cannot be written any more: {error.strerror}")

    def _reap(self, now: float) -> None:
        for rank in self._processes.reap():
            self._ended_by_itself(rank, now)

    def _ended_by_itself(self, rank: LocalRank, now: float) -> None:
        """Handles the end of a rank's process."""
        self._ending.rank_ended(rank, now)
        if not rank.status:
            self._world.rank_exited(rank.rank, describe_status(0))
        if rank.status and self._ending.reason is Reason.FAILURE and not self._lost_another(rank):
            self._announce(f"rank {rank.rank} failed: {describe_status(rank.status)}", rank.rank)

    def _lost_another(self, rank: LocalRank) -> bool:
        """Whether a rank has said that it failed because of another: that one is named as soon as it is known."""
        words = self._processes.last_words(rank)
        return words is not None and words.shared

    def _next_step(self) -> float:
        """When `_step` has something to do."""
        return self._ending.next_step()

    def _step(self, now: float) -> None:
        """Sends the signal that is due."""
        if not self._processes.running:
            self._ending.ranks_are_gone(now)
        first = not self._ending.signalled
        while (number := self._ending.take_step(now)) is not None:
            if first and self._ending.reason is Reason.FAILURE:
                culprit = self._culprit()
                if self._ending.cause is not None:
                    self._announce(self._who(self._ending.cause), self._ending.cause.rank)
                elif culprit is not None:
                    self._announce(f"rank {culprit.rank} failed: {self._how(culprit)}", culprit.rank)
                    self._blame(culprit)
                self._spared = culprit if culprit in self._processes.running else None
            first = False
            if number == signal.SIGKILL:
                self._kill()
            else:
                send(number, self._processes.to_tell(but=self._spared))

    def _kill(self) -> None:
        self._stubborn |= set(self._processes.running)
        if self._ending.reason is Reason.LEFTOVERS:
            self._say(f"killing {len(self._processes.find())} processes that the ranks left behind")
        left = end_all(self._processes.find, lambda: self._reap(time.monotonic()))
        self._killed = True
        if left:
            self._say(f"these processes survived SIGKILL: {', '.join(map(str, sorted(left)))}")

    def _finished(self, now: float) -> bool:
        """Whether nothing of the job is left."""
        if self._killed:
            return True
        if self._processes.running or now < self._look_at:
            return False
        if self._ending.undecided:
            self._look_at = self._ending.next_step()
            return False
        left = self._processes.find()
        self._look_at = now + LOOK
        if left:
            if self._ending.reason is None:
                self._ending.leftovers(now)
            return False
        return self._others_finished(now)

    def _others_finished(self, now: float) -> bool:
        """True once no other node needs this launcher. A job that failed does not wait for them."""
        if self._ending.reason not in (None, Reason.LEFTOVERS):
            return True
        others = self._world.others()
        if others:
            self._done_at = min(self._done_at, now)
            if now > self._done_at + WAITING_AFTER and not self._said_waiting:
                self._said_waiting = True
                self._say(f"all ranks of this node are done; waiting for other nodes ({others})")
            self._look_at = now + ASK
        return not others

    # -- the end -----------------------------------------------------------------------------------------------------

    def _conclude(self) -> int:
        """Shows the rest of the output and the report; returns the exit code."""
        now = time.monotonic()
        # A job that was told to end does not wait for a reader that does not read.
        patience = now + LAST_FLUSH if self._ending.reason in (Reason.SIGNAL, Reason.OUTPUT) else math.inf
        for output in self._outputs:
            for _ in output.drain(now):
                if self._writer.full and not self._flush(patience):
                    patience = now  # and there is no second wait
                    break
            output.close()
        self._take_mail(now)
        verdict = Verdict(
            self._plan,
            self._ending,
            self._by_rank,
            last_words=self._last_words(),
            stubborn=self._stubborn,
            log_path=self._console.log_path,
            host=self._host,
        )
        for rank, text, show in verdict.last_words():
            self._by_rank[rank][1].add(text, now, show=show)
        code = verdict.exit_code
        if self._upstream is not None:
            self._upstream.concluded(verdict)
        elif verdict.failed:
            self._console.err.say(verdict.report(colour=self._console.err.colour))
        if self._monitor is not None:
            findings = self._monitor.close(failed=code != 0, how=verdict.headline)
            self._take_notes()
            for line in findings:
                self._say(line)
        if not self._flush(patience) and self._ending.reason is not Reason.SIGNAL:
            return 128 + self._ending.signal if self._ending.signal else BROKEN_PIPE
        return code

    def _flush(self, until: float) -> bool:
        """Waits for a reader of our output, until Ctrl-C at the latest."""
        while not self._writer.drained(LOOK):
            if time.monotonic() >= until:
                return False
            while self._signals.arrived:
                number = self._signals.arrived.popleft()
                if number in Signals.ENDING:
                    self._ending.signal = number
                    return False
        return True

    # -- words -------------------------------------------------------------------------------------------------------

    def _announce(self, what: str, culprit: int | None = None) -> None:
        """Says once why the ranks that still run are being ended: all but the one that ends by itself."""
        running = self._processes.running
        if running and not self._announced:
            self._announced = True
            others = [rank.rank for rank in running if rank.rank != culprit]
            if self._upstream is not None:
                self._upstream.ending(what)
            else:
                self._say(f"{what}; ending {list_ranks(others)}" if others else what)

    def _say(self, text: str) -> None:
        self._console.err.say(f"phalanx: {text}")

    def _who(self, end: WorldEnd) -> str:
        if end.rank is None:
            return end.reason
        node = f" on {self._plan.node_of(end.rank)}" if self._plan.nodes > 1 else ""
        return f"rank {end.rank}{node}{'' if end.aborted else ' was lost'}: {end.reason}"

    def _culprit(self) -> LocalRank | None:
        """The rank of this node that is to blame: one that raised may end later than those that lost it."""
        said = self._ending.culprit(self._processes.ranks)
        if self._ending.cause is not None:
            return said
        words = self._last_words()
        own = (rank for rank, left in words.items() if left.own)
        raised = (rank for rank, left in words.items() if not left.shared)
        return next(raised, None) or next(own, None) or lost_silently(self._by_rank, words) or said

    def _last_words(self) -> dict[LocalRank, LastWords]:
        return {rank: words for rank in self._by_rank if (words := self._processes.last_words(rank))}

    def _how(self, culprit: LocalRank) -> str:
        if culprit.status is not None:
            return describe_status(culprit.status)
        return LEFT if self._processes.last_words(culprit) is None else RAISED

    def _blame(self, culprit: LocalRank) -> None:
        """Tells the other nodes about a rank of this one that failed without a word to the directory."""
        said = self._processes.last_words(culprit)
        tail = said.text.encode() if said is not None else self._by_rank[culprit][1].tail
        title, lines = last_words(tail, failed=culprit.status is None or culprit.status > 0)
        words = "\n".join(lines) if title == TRACEBACK else ""
        self._tell_nodes(culprit.rank, f"{self._how(culprit)} on node {self._plan.node} ({self._host})", words)

    def _tell_nodes(self, rank: int, reason: str, traceback: str = "") -> None:
        if self._plan.nodes > 1:
            self._world.abort(rank, reason, traceback)
