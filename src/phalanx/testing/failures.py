"""How a run on several ranks fails: one error for the first cause, with the rank's own traceback."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import PeerLost, PhalanxError, UsageError

__all__ = ["Died", "Failure", "RankFailed", "capture", "check_count", "first_cause", "to_error"]


class RankFailed(PhalanxError):
    """A rank of `run_ranks` failed. Where possible it is also of the type that the rank raised.

    So `except ValueError` and `pytest.raises(PeerLost)` see it, and the attributes of the original are here, too.

    Attributes:
        failed_rank: The rank that failed first.
        remote_traceback: Where, as text.
    """

    def __init__(self, message: str, failed_rank: int, remote_traceback: str = "") -> None:
        super().__init__(message)
        self.failed_rank = failed_rank
        self.remote_traceback = remote_traceback


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
class Failure:
    """What one rank has to say about its end."""

    rank: int
    at: float
    """On the monotonic clock, which is the same in all processes of a machine."""
    summary: str
    traceback: str
    error: BaseException | None = None
    """The exception itself, where it could be brought here."""
    echo_of: int | None = None
    """The rank whose loss this one merely repeats."""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def capture(rank: int, at: float, error: BaseException) -> Failure:
    """What is known of an exception, on the rank that raised it."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    first = str(error).split("\n", 1)[0]
    name = type(error).__name__
    echo = error.peer if isinstance(error, PeerLost) else None
    return Failure(rank, at, f"{name}: {first}" if first else name, text, error, echo)


def first_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that the others follow from: the earliest that does not just say that a failed rank is lost."""
    failed = {failure.rank for failure in failures}
    own = [f for f in failures if f.echo_of is None or f.echo_of not in failed or f.echo_of == f.rank]
    return min(own or failures, key=lambda failure: failure.at)


def to_error(cause: Failure, failures: Sequence[Failure]) -> RankFailed:
    """The error to raise, of the original's type where that can be."""
    lines = [f"rank {cause.rank} failed: {cause.summary}"]
    others = sorted((f for f in failures if f is not cause), key=lambda f: f.rank)
    if others:
        lines.append("then: " + "; ".join(f"rank {f.rank}: {f.summary}" for f in others))
    if cause.traceback:
        lines += ["", f"Traceback of rank {cause.rank}:", cause.traceback.rstrip()]
    message = "\n".join(lines)
    failed = _typed(cause.error, message, cause) if isinstance(cause.error, Exception) else None
    failed = failed or RankFailed(message, cause.rank, cause.traceback)
    failed.__cause__ = cause.error
    return failed


def _typed(error: Exception, message: str, cause: Failure) -> RankFailed | None:
    kind = type(error)
    if isinstance(error, RankFailed):
        kind = kind.__bases__[1] if len(kind.__bases__) > 1 else Exception
    try:
        made = type(f"RankFailed_{kind.__name__}", (RankFailed, kind), {"__module__": __name__})
        # Not by calling it: the other type's own arguments are unknown here.
        failed: Any = made.__new__(made)
        failed.__dict__.update(error.__dict__)
        failed.args = (message,)
        RankFailed.__init__(failed, message, cause.rank, cause.traceback)
        # What RankFailed's own fields would hide: who it was about is the original's to say.
        for name in ("rank", "peer", "operation"):
            if name in error.__dict__:
                failed.__dict__[name] = error.__dict__[name]
        return failed if str(failed) == message else None
    except Exception:  # some types cannot be combined with others
        return None


def check_count(n: int, timeout: float) -> None:
    """Refuses what cannot be run.

    Raises:
        UsageError: There is no rank, or no time.
    """
    if not isinstance(n, int) or n < 1:
        raise UsageError(f"n={n!r} is not valid (expected a number of ranks, 1 or more)")
    if not timeout > 0:
        raise UsageError(f"timeout={timeout!r} is not valid (expected seconds, more than 0)")
