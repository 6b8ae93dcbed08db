"""Checks, their findings, and the list of all checks.

A check is one function that takes a `Situation` and returns a `Finding` (or several). It is entered in the list by
`@check("topic")` and may not change anything on this machine. It never raises for what it looks at: a broken state is a
finding. Should it raise all the same, `examine` makes a finding of that too: one surprise does not hide the rest.
"""

from __future__ import annotations

import enum
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from phalanx.config import Launch, Options
from phalanx.operating_system import CGROUPS, PROC, SHARED_MEMORY
from phalanx.types import Address

__all__ = ["CHECKS", "Check", "Finding", "Severity", "Situation", "check", "examine", "ok", "problem", "warning"]


class Severity(enum.Enum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    """Works, but slower, or breaks under conditions that the advice names."""
    PROBLEM = "problem"
    """A job would fail here."""


@dataclass(frozen=True)
class Finding:
    """The result of one check, with advice on what to do. The advice is empty only where all is well."""

    topic: str
    status: Severity
    found: str
    advice: str = ""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """The state that the checks look at. Everything has the value of this machine unless a test says otherwise."""

    env: dict[str, str] = field(default_factory=dict, repr=False)
    """The environment. Holds the token: never show it, but what `config.snapshot` makes of it."""
    launch: Launch | None = None
    """The launch as the launcher's variables describe it; None if they contradict each other."""
    options: Options | None = None
    """The options from the environment; None where they are not valid."""
    master: Address | None = None
    """From `--master`, else from the launcher's variables."""
    hostname: str = field(default_factory=socket.gethostname)
    shm: Path = Path(SHARED_MEMORY)
    proc: Path = Path(PROC)
    cgroups: Path = Path(CGROUPS)
    patience: float = 3.0
    """Seconds that one look at the network may take."""

    @property
    def local_ranks(self) -> int:
        """How many ranks this host is to carry, as far as the variables say."""
        return self.launch.local_world_size if self.launch else 1

    @property
    def world_size(self) -> int:
        """How many ranks there are, as far as the variables say."""
        return self.launch.world_size if self.launch else 1

    @property
    def several_hosts(self) -> bool:
        """True unless all ranks are known to be on this host."""
        return self.launch is not None and not self.launch.single_host


Check = Callable[[Situation], "Finding | Iterable[Finding]"]

CHECKS: dict[str, Check] = {}
"""Every check by its topic, in the order in which they are shown."""


_Check = TypeVar("_Check", bound=Check)


def check(topic: str) -> Callable[[_Check], _Check]:
    """Enters a function in the list of checks under this topic."""

    def enter(function: _Check) -> _Check:
        if topic in CHECKS:
            raise ValueError(f"there is a check for {topic!r} already")
        CHECKS[topic] = function
        return function

    return enter


def ok(topic: str, found: str) -> Finding:
    """All is well."""
    return Finding(topic, Severity.OK, found)


def warning(topic: str, found: str, advice: str) -> Finding:
    """Works, but may bite."""
    return Finding(topic, Severity.WARNING, found, advice)


def problem(topic: str, found: str, advice: str) -> Finding:
    """A job would fail."""
    return Finding(topic, Severity.PROBLEM, found, advice)


def examine(situation: Situation) -> Iterator[Finding]:
    """Runs every check, one after the other, and gives each finding as soon as it is there."""
    for topic, function in CHECKS.items():
        try:
            result = function(situation)
            yield from ([result] if isinstance(result, Finding) else list(result))
        except Exception as error:  # a check that fails must not take the others with it
            yield warning(
                topic,
                f"this could not be looked at: {type(error).__name__}: {error}",
                "The other findings still hold. Please report this one: a check should not fail.",
            )
