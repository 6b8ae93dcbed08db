"""Checks, the list of all of them, and how one is run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

from ...backends import Backend, SubBackend
from ...backends.base import LaneBackend
from ...errors import UsageError
from ...group import Group
from ..threads import run_threads

__all__ = ["Check", "Make", "as_subgroup", "check", "checks", "find", "on_group", "run"]

Make = Callable[[int], AbstractContextManager[Sequence[Backend]]]
"""Gives the backends of a fresh world of n ranks, in order; closes them at the end."""
_F = TypeVar("_F", bound=Callable[[Any], None])

LIMIT = 60.0
"""Seconds that no check needs."""


@dataclass(frozen=True)
class Check:
    """One rule: `function(backend)` runs on each of `ranks` ranks and raises if the rule does not hold."""

    name: str
    """Such as `raw.messages_arrive_intact`."""
    ranks: int
    function: Callable[[Any], None]
    lanes: bool
    """Whether it needs sub-groups, or the backend's own messages beside those of a group: a `LaneBackend`."""
    large: bool
    """Whether it needs gigabytes of memory and some seconds."""

    @property
    def rule(self) -> str:
        """The rule in words."""
        return (self.function.__doc__ or "").split("\n", 1)[0]

    def __str__(self) -> str:
        return self.name


_checks: dict[str, Check] = {}


def check(*, ranks: int, lanes: bool = False, large: bool = False) -> Callable[[_F], _F]:
    """Adds a function to the suite. It is named by its module and its own name; its docstring is the rule."""

    def add(function: _F) -> _F:
        name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        _checks[name] = Check(name, ranks, function, lanes, large)
        return function

    return add


def checks(*, lanes: bool = True, large: bool = False) -> list[Check]:
    """The checks that a backend must pass.

    Args:
        lanes: Also those that need a `LaneBackend`. A backend with no more than the methods of `Backend` has to pass
            the others.
        large: Those with messages of gigabytes, and only those.
    """
    return [one for one in _checks.values() if one.large == large and (lanes or not one.lanes)]


def find(name: str) -> Check:
    """A check by its name.

    Raises:
        UsageError: There is none of that name.
    """
    if name not in _checks:
        raise UsageError(f"there is no check {name!r} (expected one of: {', '.join(_checks)})")
    return _checks[name]


def run(one: Check | str, make: Make, *, timeout: float = LIMIT) -> None:
    """Runs a check with ranks that are threads of this process.

    Raises:
        RankFailed: The rule does not hold; also an `AssertionError` if that is how it was found.
    """
    one = find(one) if isinstance(one, str) else one
    with make(one.ranks) as backends:

        def abort(reason: str) -> None:
            for backend in backends:
                if isinstance(backend, LaneBackend) and not backend.is_unusable:
                    backend.control.abort(reason, "")

        run_threads([functools.partial(one.function, backend) for backend in backends], timeout=timeout, abort=abort)


def on_group(group: Group, name: str) -> None:
    """Runs a check with the backend of a group: what `run_ranks` needs."""
    find(name).function(group.backend)


def as_subgroup(make: Make) -> Make:
    """Worlds that are sub-groups of larger ones: rank 1 of the parent is left out."""

    @contextlib.contextmanager
    def make_subgroup(n: int) -> Iterator[list[Backend]]:
        with make(n + 1) as parents:
            # Rank 0 is in it, because on a star no other rank is connected with all.
            members = [0, *range(2, n + 1)]
            chosen: list[Any] = [parents[member] for member in members]
            backends = [SubBackend(parent, members) for parent in chosen]
            try:
                yield list(backends)
            finally:
                for backend in backends:
                    backend.close()

    return make_subgroup
