"""One absolute point in time per operation, handed down unchanged, so that nothing below can restart it."""

from __future__ import annotations

import math
import threading
import time

from .arguments import as_seconds
from .errors import UsageError

__all__ = ["Deadline"]

_LONGEST_POLL = 2_000_000  # seconds; `select.poll` counts milliseconds in 32 bits


class Deadline:
    """A point on the monotonic clock, and how many seconds it was away when it was made.

    Args:
        seconds: From now. `math.inf` is allowed for internal waits that something else bounds.

    Raises:
        UsageError: `seconds` is negative or not a number.
    """

    __slots__ = ("at", "seconds")

    def __init__(self, seconds: float) -> None:
        if type(seconds) is not float:
            seconds = as_seconds(seconds)
        if not seconds >= 0:  # also refuses NaN
            raise UsageError(f"timeout={seconds!r} is not valid (expected seconds, 0 or more)")
        self.seconds = seconds
        self.at = time.monotonic() + seconds

    @classmethod
    def of(cls, timeout: float | None, default: float) -> Deadline:
        """The deadline of a public call: the caller's `timeout`, or the default.

        Raises:
            UsageError: `timeout` is not a number of seconds, negative, or without an end.
        """
        return cls(default if timeout is None else as_seconds(timeout))

    def remaining(self) -> float:
        """Seconds left; never negative, and never more than a lock can wait."""
        return min(max(0.0, self.at - time.monotonic()), threading.TIMEOUT_MAX)

    @property
    def expired(self) -> bool:
        """True once the point has passed."""
        return time.monotonic() >= self.at

    def poll_ms(self) -> int | None:
        """The time left for `select.poll`, in milliseconds rounded up: no wait ends just before the deadline."""
        left = self.remaining()
        return None if left >= _LONGEST_POLL else math.ceil(left * 1000)

    def sooner(self, seconds: float) -> Deadline:
        """A deadline `seconds` from now, but never later than this one."""
        return Deadline(min(seconds, self.remaining()))

    def __repr__(self) -> str:
        return f"Deadline({self.remaining():.3f} s of {self.seconds:g} s left)"
