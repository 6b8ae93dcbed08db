"""The verdict on a job that has ended: the launcher's exit code, and the report on a failure."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

from phalanx.last_words import LastWords

from .ending import Ending, Reason
from .output import RankOutput
from .plan import RunPlan
from .processes import LocalRank
from .report import LEFT, RAISED, JobFailure, describe_status, failure_report, list_ranks, victims_line

__all__ = ["BROKEN_PIPE", "Verdict", "lost_silently"]

BROKEN_PIPE = 128 + signal.SIGPIPE
"""The exit code of a job whose output was closed."""
_ENDED_BY_US = (-signal.SIGTERM, -signal.SIGKILL)
"""How a rank may end because the launcher wants it."""


def lost_silently(ranks: Iterable[LocalRank], last_words: Mapping[LocalRank, LastWords]) -> LocalRank | None:
    """The rank that others have lost and that has said nothing itself, as after `sys.exit`; None if there is none."""
    lost = {words.lost for words in last_words.values()}
    return next((rank for rank in ranks if rank.rank in lost and rank not in last_words), None)


class Verdict:
    """How a job ended, in a number and in words.

    Args:
        plan: The job.
        ending: Its end, as far as it was decided.
        outputs: The ranks of this node, with their standard output and error.
        last_words: The tracebacks that ranks have left, instead of printing them.
        stubborn: Ranks that were killed after the grace period.
        log_path: (rank, name of the output) -> its log file, if it has one.
        host: The name of this machine.
    """

    def __init__(
        self,
        plan: RunPlan,
        ending: Ending,
        outputs: Mapping[LocalRank, tuple[RankOutput, RankOutput]],
        *,
        last_words: Mapping[LocalRank, LastWords],
        stubborn: Collection[LocalRank],
        log_path: Callable[[int, str], Path | None],
        host: str,
    ) -> None:
        self._plan = plan
        self._ending = ending
        self._outputs = outputs
        self._last_words = last_words
        self._stubborn = stubborn
        self._log_path = log_path
        self._host = host
        self._culprit = ending.culprit(list(outputs))
        if ending.cause is None:  # nobody has said who was the first
            self._culprit = self.suspect
        elif self._culprit is not None:  # or who was the first to notice what another had done
            self._culprit = min([self._culprit, *last_words], key=self._innocence)

    @property
    def exit_code(self) -> int:
        """The launcher's exit code: after a failure that of the rank that is to blame."""
        reason = self._ending.reason
        if reason is Reason.SIGNAL:
            return 128 + self._ending.signal
        if reason is Reason.OUTPUT:
            return BROKEN_PIPE
        if reason is not Reason.FAILURE:
            return 0
        culprit = self._culprit
        if culprit is None or not culprit.status or culprit in self._stubborn:
            return 1
        if self._ended_on_its_way_out(culprit):
            return 1
        return culprit.status if culprit.status > 0 else 128 - culprit.status

    @property
    def headline(self) -> str:
        """A few words on what was wrong; empty if nothing was."""
        reason, cause, culprit = self._ending.reason, self._ending.cause, self._culprit
        if reason is Reason.SIGNAL:
            return f"it was ended by {signal.Signals(self._ending.signal).name}"
        if reason is Reason.OUTPUT:
            return "its output was closed"
        if reason is not Reason.FAILURE:
            return ""
        if culprit is not None:
            traceback = self._traceback(culprit).strip()
            return f"rank {culprit.rank} failed: {traceback.splitlines()[-1] if traceback else self._how(culprit)}"
        assert cause is not None
        return cause.reason if cause.rank is None else f"rank {cause.rank} failed: {cause.reason}"

    @property
    def failed(self) -> bool:
        """True if a rank failed, here or on another node."""
        return self._ending.reason is Reason.FAILURE

    @property
    def blamed(self) -> int | None:
        """The rank that is to blame as far as this node knows, here or on another node."""
        if self._ending.cause is not None:
            return self._ending.cause.rank
        return None if self._culprit is None else self._culprit.rank

    @property
    def suspect(self) -> LocalRank | None:
        """The rank of this node that is to blame: rather one that did not fail because of another.

        One that raised may end later than those that lost it, and only then if the launcher ends it: it has left its
        last words before.
        """
        candidates = [*([self._culprit] if self._culprit is not None else []), *self._ending.failed, *self._last_words]
        found = min(candidates, key=self._innocence, default=None)
        if found is not None and self._innocence(found) < 2:
            return found
        return lost_silently(self._outputs, self._last_words) or self._culprit

    def _innocence(self, rank: LocalRank) -> int:
        """0 for a rank that failed by itself, 1 after an error of its own, 2 because of another."""
        words = self._last_words.get(rank)
        return 0 if words is None or not words.shared else 1 if words.own else 2

    def blaming(self, rank: LocalRank) -> Verdict:
        """The verdict if this rank were to blame."""
        other = copy.copy(self)
        other._culprit = rank
        return other

    def report(self, *, colour: bool, end: str | None = None) -> str:
        """The report on a job that failed.

        Args:
            colour: Whether to use colour.
            end: The line after the traceback; None for one about the other ranks of this node.
        """
        cause, culprit = self._ending.cause, self._culprit
        end = victims_line(*self.victims) if end is None else end
        if culprit is None:
            assert cause is not None
            if cause.rank is None:
                return f"phalanx: {cause.reason}"
            where = self._plan.node_of(cause.rank)
            verb = "ended the world" if cause.aborted else "was lost"
            far = JobFailure(cause.rank, cause.reason, where, verb=verb, last_words=cause.traceback)
            return failure_report(far, (), victim=self._victim(), end=end, colour=colour)
        stdout, stderr = (output.tail for output in self._outputs[culprit])
        failure = JobFailure(
            culprit.rank,
            self._how(culprit),
            self._host,
            culprit.pid,
            self._log_path(culprit.rank, "stderr"),
            stderr,
            stdout,
            self._traceback(culprit),
            killed=(culprit.status or 0) < 0,
        )
        return failure_report(failure, self._notes(culprit), victim=self._victim(), end=end, colour=colour)

    def last_words(self) -> Iterator[tuple[LocalRank, str, bool]]:
        """For each rank that has left a traceback: the rank, the text, and whether to show it besides the report.

        One that says the same as another, or that follows from the failure that is reported, is not shown.
        """
        failed = self._ending.reason is Reason.FAILURE
        seen = {self._traceback(self._culprit)} if failed and self._culprit is not None else set()
        for rank, words in self._last_words.items():
            show = words.text not in seen and not (failed and (words.shared or rank is self._culprit))
            seen.add(words.text)
            yield rank, words.text, show

    def _traceback(self, culprit: LocalRank) -> str:
        """The traceback of the rank that is to blame; empty if there is none but what it may have printed itself."""
        words = self._last_words.get(culprit)
        if words is not None:
            return words.text
        output = any(stream.tail for stream in self._outputs[culprit])
        cause = self._ending.cause
        return cause.traceback if cause is not None and cause.rank == culprit.rank and not output else ""

    def _victim(self) -> tuple[int, str] | None:
        """The first rank that failed because of another, and what it said."""
        for rank in (*self._ending.failed, *self._last_words):
            words = self._last_words.get(rank)
            if words is not None and words.shared and rank is not self._culprit:
                return rank.rank, words.text
        return None

    @property
    def victims(self) -> tuple[list[int], int]:
        """The ranks that failed as the culprit did, and how many others ended because of it."""
        others = {rank: words for rank, words in self._last_words.items() if rank is not self._culprit}
        text = "" if self._culprit is None else self._traceback(self._culprit)
        same = [rank.rank for rank, words in others.items() if words.text == text]
        return same, sum(words.shared and words.text != text for words in others.values())

    def _ended_on_its_way_out(self, culprit: LocalRank) -> bool:
        """Whether it had raised, and the launcher's signal came before its own end."""
        return culprit.status in _ENDED_BY_US and culprit in self._last_words

    def _how(self, culprit: LocalRank) -> str:
        cause = self._ending.cause
        if culprit in self._stubborn:
            what = cause.reason if cause else RAISED if culprit in self._last_words else LEFT
            return f"{what}; it had to be killed after {self._plan.grace:g} s"
        if self._ended_on_its_way_out(culprit):
            return RAISED
        if not culprit.status:
            ended = f" ({describe_status(0)})"
            return f"{cause.reason.removesuffix(ended) if cause is not None and cause.aborted else LEFT}{ended}"
        return describe_status(culprit.status)

    def _notes(self, culprit: LocalRank) -> list[str]:
        """Lines about the other ranks."""
        also = [rank for rank in self._ending.failed if rank is not culprit and rank not in self._last_words]
        known = {culprit, *also, *self._last_words}
        ended = [rank.rank for rank in self._outputs if rank.status and rank not in known]
        notes = []
        cause = self._ending.cause
        if cause is not None and cause.aborted and culprit.status and not cause.traceback:
            notes.append(cause.reason)
        if also:
            notes.append("then failed: " + ", ".join(f"rank {r.rank} ({describe_status(r.status or 0)})" for r in also))
        if ended:
            notes.append(f"ended by the launcher: {list_ranks(ended)}")
        return notes
