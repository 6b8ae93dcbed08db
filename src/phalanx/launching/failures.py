"""How a run on several ranks fails: one error for the first cause, with the rank's own traceback."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..arguments import as_index, as_seconds
from ..errors import PeerLost, RankFailed, UsageError
from ..exception_text import message_of
from ..frames import user_traceback
from ..last_words import is_shared

__all__ = [
    "ATTACHED",
    "FAILED_AT",
    "MILD",
    "Died",
    "RankFailure",
    "capture",
    "check_count",
    "first_cause",
    "noting",
    "to_error",
]

FAILED_AT = "_phalanx_failed_at"
"""The attribute in which an exception carries the time when it left the user's function."""
ATTACHED = "_phalanx_attached"
"""The attribute in which an exception carries plain data for whoever started the ranks; `RankFailed` has it, too."""
MILD = "_phalanx_mild"
"""The attribute of an exception that makes its failure a mild one."""


@dataclass(frozen=True)
class Died:
    """The result of a rank that was meant to die and did (`may_die=`)."""

    rank: int
    signal: int | None = None
    """The signal that ended it; None if it exited."""
    code: int | None = None
    """Its exit code; None if a signal ended it."""
    stopped: bool = False
    """Whether it was stopped (SIGSTOP) and therefore ended by `run_ranks`, once all others were done."""

    def __str__(self) -> str:
        if self.stopped:
            return "was stopped, and did not go on"
        if self.signal is not None:
            return f"was killed by {_signal_name(self.signal)}"
        return f"exited with code {self.code} before it was done"


@dataclass
class RankFailure:
    """The failure of one rank, as that rank reported it."""

    rank: int
    at: float
    """On the monotonic clock, which is the same in all processes of a machine."""
    summary: str
    traceback: str
    error: BaseException | None = None
    """The exception itself, where it could be brought here."""
    echo_of: int | None = None
    """The rank that the error reports as lost."""
    shared: bool = False
    """The error is one that all ranks of a group raise: it says nothing that the first of them does not."""
    died: bool = False
    """Whether the rank ended without a report."""
    attached: Any = None
    """Plain data that came with the error."""
    mild: bool = False
    """Whether any other failure counts for more: a test that was skipped, where another rank failed."""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def capture(rank: int, at: float, error: BaseException) -> RankFailure:
    """An exception as a failure, on the rank that raised it."""
    text = user_traceback(error)
    first = message_of(error).split("\n", 1)[0]
    name = type(error).__name__
    echo = error.peer if isinstance(error, PeerLost) else None
    summary = f"{name}: {first}" if first else name
    attached = getattr(error, ATTACHED, None)
    mild = bool(getattr(error, MILD, False))
    return RankFailure(rank, at, summary, text, error, echo, is_shared(error), attached=attached, mild=mild)


def noting(fn: Callable[..., Any], *args: Any) -> Any:
    """Calls a function; an exception that leaves it is marked with the time, before another rank can notice it."""
    try:
        return fn(*args)
    except BaseException as error:
        with contextlib.suppress(AttributeError, TypeError):
            setattr(error, FAILED_AT, time.monotonic())
        raise


def first_cause(failures: Sequence[RankFailure]) -> RankFailure:
    """The failure that the others follow from: the earliest that does not just say that a failed rank is lost."""

    def is_echo(failure: RankFailure) -> bool:
        # When a rank died is only known from when it was noticed, so that its time says nothing.
        return any(f.rank == failure.echo_of and f is not failure and (f.died or f.at <= failure.at) for f in failures)

    return min([f for f in failures if not is_echo(f)] or failures, key=lambda failure: (failure.mild, failure.at))


def to_error(cause: RankFailure, failures: Sequence[RankFailure], ended: int = 0) -> RankFailed:
    """The error to raise, of the original's type where that can be.

    Args:
        ended: The number of ranks that were ended because of it.
    """
    lines = [f"rank {cause.rank} failed: {cause.summary}"]
    # Beside a traceback, those of ranks that failed because of it say nothing. Without one, they are all there is.
    others = [f for f in failures if f is not cause and not (f.shared and cause.traceback)]
    ended += len(failures) - 1 - len(others)
    same = sorted(
        f.rank for f in others if cause.traceback and (f.summary, f.traceback) == (cause.summary, cause.traceback)
    )
    others = [f for f in others if f.rank not in same]
    if same:
        lines.append(f"the same on rank{'s' if len(same) > 1 else ''} {', '.join(map(str, same))}")
    if others:
        others.sort(key=lambda f: f.rank)
        lines.append("then: " + "; ".join(f"rank {f.rank}: {f.summary}" for f in others))
    if ended:
        lines.append(f"{ended} rank{'s' if ended > 1 else ''} ended because of it")
    if cause.traceback:
        lines += ["", f"Traceback of rank {cause.rank}:", cause.traceback.rstrip()]
    message = "\n".join(lines)
    failed = _typed(cause.error, message, cause) if isinstance(cause.error, Exception) else None
    failed = failed or RankFailed(message, cause.rank, cause.traceback)
    failed.__cause__ = cause.error
    setattr(failed, ATTACHED, cause.attached)
    return failed


def _typed(error: Exception, message: str, cause: RankFailure) -> RankFailed | None:
    kind = type(error)
    if isinstance(error, RankFailed):
        kind = kind.__bases__[1] if len(kind.__bases__) > 1 else Exception
    try:
        made: Any = type(f"RankFailed_{kind.__name__}", (RankFailed, kind), {"__module__": RankFailed.__module__})
        # Not by calling it: the arguments of the other type are unknown here.
        failed: Any = made.__new__(made)
        failed.args = (message,)
    except Exception:  # some types cannot be combined with others
        return None
    # What the rank's error was about (`peer`, `expected`, ...) is this one's to say, too.
    blank = {"rank": None, "peer": None, "operation": None}
    own = {"message": message, "failed_rank": cause.rank, "remote_traceback": cause.traceback}
    failed.__dict__.update(blank | error.__dict__ | own)
    found: RankFailed = failed
    return found


def check_count(n: int, timeout: float) -> tuple[int, float]:
    """The number of ranks and the seconds as plain numbers.

    Raises:
        UsageError: There is no rank, or no time.
    """
    if as_index(n, "n", "a number of ranks, 1 or more") < 1:
        raise UsageError(f"n={n!r} is not valid (expected a number of ranks, 1 or more)")
    if not as_seconds(timeout) > 0:
        raise UsageError(f"timeout={timeout!r} is not valid (expected seconds, more than 0)")
    return as_index(n, "n"), as_seconds(timeout)
