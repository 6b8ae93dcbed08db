"""`launch`: ranks from a script or a notebook, as `phalanx run` starts them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

from ..arguments import as_index, as_seconds, shown
from ..config import Options, inherited
from ..deadline import Deadline
from ..errors import RankFailed, UsageError
from ..frames import hides_frames
from ..rendezvous.hosting.start import HostedDirectory
from ..system_limits import naming_limits
from ..types import Address
from ..world import abort_worlds, close_worlds
from . import shipping
from .environment import OWN_VARIABLES, cores, new_run_id, new_token, rank_environment, reserve_port
from .failures import noting
from .guardian import end_all, relatives
from .rank_process import Task
from .running_ranks import Manners, run_task
from .shown_output import ShownOutput

__all__ = ["launch", "launch_task"]

LOOPBACK = "127.0.0.1"
NOTICE = 1.0
"""Seconds in which ranks may raise `PeerLost` by themselves, once another has failed."""
T = TypeVar("T")
HINT = "make it inside the function that the ranks call, or pass plain data"


@hides_frames
def launch(
    fn: Callable[..., T],
    n: int,
    *args: Any,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    prefix: bool = True,
    grace: float = 5.0,
) -> list[T]:
    """Calls `fn(*args)` on `n` ranks of this machine, and returns what each returned, in the order of ranks.

    Each rank is a process with the variables that `phalanx run` sets, so that inside `fn` both `phalanx.init()` and
    `torch.distributed.init_process_group("phalanx")` find the world. Worlds that are still open when `fn` returns are
    closed.

    `fn` may be any function, also a lambda, a closure or one from a cell of a notebook; what it uses, `args` and the
    results are copied. Modules are imported anew by each rank: what this process has changed in them, its loggers and
    its random state are not there. Standard input is empty.

    What ranks print appears here, in `sys.stdout` and `sys.stderr`, with the rank in front of each line. The first rank
    that fails ends all. Ctrl-C (the stop button of a notebook) interrupts all ranks, and kills those that have not
    ended after `grace` seconds, or at the second Ctrl-C. No process is left behind.

    Args:
        fn: Called on each rank.
        n: How many ranks.
        *args: For `fn`.
        timeout: Seconds for all of it; None for no limit.
        env: More environment variables for the ranks.
        prefix: Whether lines of output have the rank in front.
        grace: Seconds for ranks to end when they are told to.

    Raises:
        RankFailed: A rank failed or was not done in time. Its message names the first rank that failed and holds that
            rank's traceback. If possible it is also of the type that the rank raised.
        UsageError: The arguments are not valid, or cannot be copied to the ranks.
        OutOfResources: This process has no more descriptors, threads or memory; names the limit.
    """
    if not callable(fn):
        hint = ", as in launch(fn, 4)" if callable(n) else ""
        if fn is None:
            hint = " itself, as in launch(train, 4): launch(train(), 4) calls it here, once"
        elif isinstance(fn, str):
            hint = "; `phalanx run -n 4 script.py` starts a script"
        raise UsageError(f"fn={shown(fn)} is not valid (expected a function{hint})")
    task = Task(call, (fn, args), runs_exit_handlers=True)
    try:
        return launch_task(task, n, timeout=timeout, env=env, prefix=prefix, grace=grace)
    except RankFailed as error:
        raise error from None  # its text has the rank's own error


def call(_rank: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """In the process of a rank: calls the user's function, and ends its worlds as the end of a program does."""
    try:
        result = noting(fn, *args)
    except SystemExit as error:
        if error.code not in (None, 0):
            abort_worlds(error)
            raise
        result = None
    except BaseException as error:
        abort_worlds(error)
        raise
    close_worlds()
    return result


def launch_task(
    task: Task,
    n: int,
    *,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    prefix: bool = True,
    grace: float = 5.0,
    by_value: Collection[str] = (),
    hint: str = HINT,
) -> list[Any]:
    """As `launch`, for any task.

    Args:
        by_value: Modules that ranks do not import: their functions travel as code.
        hint: What to do about a value that cannot be copied.
    """
    n, deadline = _checked(n, timeout)
    _check_environment(env)
    if not as_seconds(grace, "grace") >= 0:
        raise UsageError(f"grace={shown(grace)} is not valid (expected seconds, 0 or more)")
    base = inherited()
    shipped = shipping.dumps(task, by_value=by_value, hint=hint)
    run_id = new_run_id(base)
    token = new_token().encode()
    available = cores()
    with naming_limits(), contextlib.ExitStack() as stack:
        directory = stack.enter_context(_directory(n, token))
        master = Address(LOOPBACK, stack.enter_context(reserve_port()))
        environments = [
            rank_environment(
                base,
                rank,
                n,
                local_rank=rank,
                local_world_size=n,
                master=master,
                directory=directory.address,
                token=token,
                run_id=run_id,
                cores=available,
                extra=env,
            )
            for rank in range(n)
        ]
        # What a rank has started in a session of its own is found by the job's id.
        stack.callback(end_all, lambda: relatives(run_id))
        colour = not base.get("NO_COLOR") and base.get("TERM") != "dumb"
        return run_task(
            shipped.data,
            environments,
            server_environment={name: value for name, value in environments[0].items() if name not in OWN_VARIABLES},
            modules=shipped.modules,
            deadline=deadline,
            manners=Manners(NOTICE, grace, exit_time=grace),
            output=ShownOutput(n, prefix=prefix, colour=colour),
            on_exit=directory.rank_exited,
        )


@contextlib.contextmanager
def _directory(n: int, token: bytes) -> Iterator[HostedDirectory]:
    """The directory, in a process of its own: this one may be busy in another thread."""
    directory = HostedDirectory(n, token=token, bind=Address(LOOPBACK, 0), options=Options.from_env())
    try:
        directory.ready()
        yield directory
    finally:
        directory.close()


def _checked(n: int, timeout: float | None) -> tuple[int, Deadline]:
    if as_index(n, "n", "a number of ranks, 1 or more") < 1:
        raise UsageError(f"n={n!r} is not valid (expected a number of ranks, 1 or more)")
    seconds = math.inf if timeout is None else as_seconds(timeout)
    if not seconds > 0:
        raise UsageError(f"timeout={timeout!r} is not valid (expected seconds, more than 0, or None)")
    return as_index(n, "n"), Deadline(seconds)


def _check_environment(env: Mapping[str, str] | None) -> None:
    for name, value in (env or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise UsageError(f"env={{{shown(name)}: {shown(value)}}} is not valid (expected strings)")
        if name in OWN_VARIABLES:
            raise UsageError(f"env={{{name!r}: …}} is not possible: launch sets {name} itself")
