"""The times that operations have, and that ranks have to meet and to part, where the program does not say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from ..arguments import as_seconds
from .reader import VariableReader, invalid

__all__ = ["Timeouts", "operation_timeout", "timeouts"]

OPERATION = 600.0
"""Long enough for a rank that evaluates or saves a model while the others wait for it in a collective."""
MEETING = 30.0
"""Short, because ranks that never meet are a mistake, and nothing is lost by saying so soon."""


class Timeouts(NamedTuple):
    """Seconds."""

    operation: float
    """The default of every operation."""
    meeting: float
    """For forming the world, and for the goodbyes at its end."""


def timeouts(given: float | None, env: Mapping[str, str] | None = None) -> Timeouts:
    """The timeouts of a backend: both as given; else those of `PHALANX_TIMEOUT` and of the library.

    Raises:
        ConfigError: The variable is not a number of seconds.
        UsageError: `given` is not a number of seconds.
    """
    if given is not None:
        seconds = as_seconds(given)
        return Timeouts(seconds, seconds)
    return Timeouts(operation_timeout(OPERATION, env), MEETING)


def operation_timeout(default: float, env: Mapping[str, str] | None = None) -> float:
    """The seconds of an operation where the program does not say: those of `PHALANX_TIMEOUT`, else `default`.

    Raises:
        ConfigError: The variable is not a number of seconds.
    """
    text = VariableReader(env).text("PHALANX_TIMEOUT")
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise invalid("PHALANX_TIMEOUT", text, "seconds, more than 0")
    return seconds
