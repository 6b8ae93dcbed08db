"""Ranks of `run_ranks` that are processes: each joins a world and calls the function with its group."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from ..config import Options, inherited
from ..deadline import Deadline
from ..errors import UsageError
from ..group import Group
from ..launching import shipping
from ..launching.failures import noting
from ..launching.rank_process import Task
from ..launching.running_ranks import Manners, run_task
from .worlds import Factory, MeetingPlace, join, meeting_place

__all__ = ["run_processes"]

MOST = 120
"""Ranks at once: tests of more want a launcher."""
HINT = "pass plain data, or use backend='simulated', whose ranks are threads"


def run_processes(
    n: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    backend: str | Factory,
    timeout: float,
    patience: float,
    options: Options | None,
    env: Mapping[str, str] | None,
    may_die: Collection[int],
) -> list[Any]:
    """`run_ranks` for ranks that are processes; see there."""
    if n > MOST:
        raise UsageError(f"n={n} is too many (at most {MOST} processes can be run at once)")
    deadline = Deadline(timeout)
    environment = inherited() | dict(env or {})
    with meeting_place(backend, n, options) as place:
        task = shipping.dumps(Task(_join_and_call, (place, patience, fn, args)), hint=HINT)
        return run_task(
            task.data,
            [environment] * n,
            server_environment=environment,
            modules=[*shipping.modules_of(_join_and_call), *shipping.modules_of(fn)],
            deadline=deadline,
            manners=Manners(),
            may_die=may_die,
        )


def _join_and_call(
    rank: int, place: MeetingPlace, patience: float, fn: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    with Group(join(place, rank, patience), _owns_backend=True) as group:
        return noting(fn, group, *args)
