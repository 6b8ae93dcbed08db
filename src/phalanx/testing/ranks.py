"""`run_ranks`: one function, several ranks, one result."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ..arguments import as_ranks, shown
from ..backends.simulated import SimulatedBackend
from ..config import Options
from ..errors import InvalidRank, UsageError
from ..frames import hides_frames
from ..group import Group
from ..launching.failures import check_count, noting
from .processes import run_processes
from .threads import run_threads
from .worlds import Factory

__all__ = ["run_ranks"]

LONGEST_OPERATION = 30.0
"""Seconds that an operation of a test has at most, unless the test says otherwise."""


@hides_frames
def run_ranks(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    backend: str | Factory = "simulated",
    timeout: float = 60.0,
    options: Options | None = None,
    env: Mapping[str, str] | None = None,
    may_die: Collection[int] = (),
) -> list[Any]:
    """Runs `fn(group, *args)` on `n` ranks and returns what each returned, in the order of ranks.

    `"simulated"` ranks are threads; all others are processes, which take some milliseconds each to start. There, too,
    `fn` may be any function, also a lambda or a closure; what it closes over, `args` and results are copied. Modules
    that it uses are imported anew, so what the calling process has changed in them is not seen.

    The processes are forked from a helper that has no threads and has everything imported. It is started by the first
    call, and ends with the calling process, or when it was not needed for two minutes.

    An operation of `group` may take half of `timeout` unless it is told otherwise, 30 s at most.

    Args:
        n: How many ranks.
        fn: Called on each rank with the group of all and `args`.
        backend: `"simulated"`, `"mesh"`, `"mesh-ipv6"`, `"mesh-classic"`, `"tcp"` (the star), or a function
            `(rank, world_size, master) -> Backend`.
        timeout: Seconds for all of it.
        options: For backends over TCP.
        env: More environment variables for the processes.
        may_die: Ranks that are meant to die or to be stopped (see `faults`): the result of one that does is a `Died`.

    Raises:
        RankFailed: A rank failed or was not done in time. Its message begins with the first rank that failed and holds
            that rank's traceback, or what each rank was doing. If possible it is also of the type that the rank raised.
        UsageError: The arguments do not fit together.
        ConfigError: There is no such backend.
    """
    n, timeout = check_count(n, timeout)
    if not callable(fn):
        raise UsageError(f"fn={shown(fn)} is not valid (expected a function of a group)")
    try:
        may_die = as_ranks(may_die, n, "may_die")
    except InvalidRank:
        raise UsageError(f"may_die={shown(may_die)} is not valid (expected ranks from 0 to {n - 1})") from None
    patience = min(LONGEST_OPERATION, timeout / 2)
    if not isinstance(backend, str) or backend != "simulated":
        return run_processes(
            n, fn, args, backend=backend, timeout=timeout, patience=patience, options=options, env=env, may_die=may_die
        )
    if may_die or env:
        raise UsageError("may_die and env need ranks that are processes (backend='mesh' or another)")
    backends = SimulatedBackend.create_group(n, timeout=patience)

    def body(mine: SimulatedBackend) -> Any:
        with Group(mine, _owns_backend=True) as group:
            return noting(fn, group, *args)

    def abort(reason: str) -> None:
        for one in backends:
            if not one.is_unusable:
                one.control.abort(reason, "")

    return run_threads([functools.partial(body, one) for one in backends], timeout=timeout, abort=abort)
