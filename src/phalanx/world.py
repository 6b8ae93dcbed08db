"""One way in: `init()` finds out who this process is, meets the others, and returns the group of everybody."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from traceback import extract_tb
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from .arguments import shown
from .config import (
    Launch,
    Options,
    backend_of_choice,
    debug,
    detect,
    log_level,
    nearest_variable,
    options_of,
    started_as,
    timeouts,
    unknown_variables,
)
from .deadline import Deadline
from .errors import ConfigError, PeerLost, RendezvousError, UsageError
from .exception_text import describe
from .frames import frames_are_hidden, hide_frames, hides_frames, user_traceback
from .last_words import say
from .rendezvous.error_codec import lost_peer
from .rendezvous.meeting import Meeting, arrange
from .system_limits import naming_limits
from .types import Address

if TYPE_CHECKING:  # `init` loads these while the directory's process starts
    from .backends.base import LaneBackend
    from .group import Group

__all__ = ["abort_worlds", "close_at_exit", "close_worlds", "init"]

BACKENDS = ("auto", "mesh", "tcp", "mpi")
STOOD_IN_FOR = ("gloo", "nccl", "phalanx")
"""Names that torch.distributed has for its backends."""


@hides_frames
def init(
    backend: str = "auto",
    *,
    rank: int | None = None,
    world_size: int | None = None,
    master: str | Address | None = None,
    token: str | bytes | None = None,
    auth: Literal["token", "none"] = "token",
    timeout: float | None = None,
    options: Options | None = None,
) -> Group:
    """Forms the world and returns the group of all its ranks.

    What is not given is found in the variables of torchrun, `phalanx run`, Open MPI, MPICH or Slurm. Without any, it is
    a world of one.

    Args:
        backend: `"mesh"` connects every rank with every other; `"tcp"` is the classic star; `"mpi"` is the MPI whose
            launcher started this process, and tells rank and world size; `"auto"` is what `PHALANX_BACKEND` says, else
            `"mesh"`.
        rank: This rank.
        world_size: How many ranks there are.
        master: `"host:port"`, where rank 0 can be met.
        token: The job's secret; else `PHALANX_TOKEN`; else ranks on one host share one through a private file.
        auth: `"none"` is the only way to run without a token.
        timeout: Seconds for forming the world, and the default of every operation. Without it the world has 30 s to
            form, and an operation as long as `PHALANX_TIMEOUT` says, or ten minutes.
        options: Everything else.

    Raises:
        ConfigError: The job is described in a way that cannot work; names the variable or argument.
        RendezvousError: The world did not form; names the ranks that are missing.
        OutOfResources: This process has no more descriptors, threads or memory; names the limit.
    """
    _refuse_second_run()
    _watch_exceptions()
    debug()  # refuses a value that it cannot have
    if not isinstance(backend, str) or backend not in BACKENDS:
        hint = (
            "; Phalanx itself stands in for it: leave it out"
            if isinstance(backend, str) and backend in STOOD_IN_FOR
            else ""
        )
        valid = ", ".join(map(repr, BACKENDS))
        raise ConfigError(f"backend={shown(backend)} is not valid (expected one of {valid}{hint})")
    if not isinstance(auth, str) or auth not in ("token", "none"):
        raise ConfigError(f"auth={shown(auth)} is not valid (expected 'token' or 'none')")
    if auth == "none" and token is not None:
        raise ConfigError("auth='none' does not go with a token (leave one of them out)")
    if backend == "auto":
        backend = backend_of_choice()
    resolved = options_of(options).resolve()
    with naming_limits():
        made, formed = _join(backend, rank, world_size, master, token, auth, timeout, resolved)
    from .group import Group

    group = Group(made, _owns_backend=True)
    close_at_exit(group, formed)
    return group


def _refuse_second_run() -> None:
    """Refuses a call from a script that multiprocessing runs again, to import it, in a process that it starts.

    Raises:
        UsageError: It is such a process: as a copy of its parent, it would come with the parent's rank.
    """
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and getattr(processes.current_process(), "_inheriting", False):
        raise UsageError(
            "init() was called while multiprocessing imports this script in a process that it has started: the script "
            'runs there from the top (put what only the rank itself should do under `if __name__ == "__main__":`)'
        )


def _join(
    backend: str,
    rank: int | None,
    world_size: int | None,
    master: str | Address | None,
    token: str | bytes | None,
    auth: Literal["token", "none"],
    timeout: float | None,
    options: Options,
) -> tuple[LaneBackend, Formed]:
    if backend == "mpi":
        if rank is not None or world_size is not None:
            raise ConfigError("backend='mpi' takes rank and world size from MPI (leave rank= and world_size= out)")
        from .backends.mpi.backend import MpiBackend

        made = MpiBackend(timeout=timeout, options=options, master=master, token=token, auth=auth)
        _apply_log_level(made.rank)
        if made.rank == 0:
            _warn_of_unknown_variables()
        return made, (backend, made.rank, None, None)
    launch = detect(rank=rank, world_size=world_size, master=master, token=token)
    _apply_log_level(launch.rank)
    if launch.local_rank == 0:
        _warn_of_unknown_variables()
    _refuse_second(backend, launch)
    meeting = None
    if backend == "mesh" and launch.hosts_directory:
        meeting = arrange(launch, auth=auth, options=options, deadline=Deadline(timeouts(timeout).meeting))
    try:
        made_here = _backend(backend, launch, auth, timeout, options, meeting)
        return made_here, (backend, launch.rank, launch.master, launch.directory)
    except BaseException:
        if meeting is not None:
            meeting.close()
        raise


def _apply_log_level(rank: int) -> None:
    """Does what `PHALANX_LOG` asks for; without it, logging is the program's own business."""
    level = log_level()
    logger = logging.getLogger("phalanx")
    if level is None or logger.handlers:
        return
    logger.setLevel(level)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"%(asctime)s rank {rank} %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)


def _backend(
    name: str,
    launch: Launch,
    auth: Literal["token", "none"],
    timeout: float | None,
    options: Options,
    meeting: Meeting | None,
) -> LaneBackend:
    if launch.world_size == 1 and launch.joins is None:
        from .backends.simulated import SimulatedBackend

        return SimulatedBackend.create_group(1, timeout=timeout, options=options)[0]
    if name == "tcp":
        if auth != "none":
            raise ConfigError(
                "backend='tcp' is the classic star, which has no authentication: say auth='none', or use backend='mesh'"
            )
        if launch.master is None:
            raise ConfigError("backend='tcp' needs a master (set MASTER_ADDR and MASTER_PORT, or give master=)")
        from .backends.classic.star import TcpBackend

        return TcpBackend(launch.rank, launch.world_size, launch.master, timeout=timeout, options=options)
    from .backends.mesh.backend import MeshBackend

    return MeshBackend.from_launch(launch, auth=auth, timeout=timeout, options=options, meeting=meeting)


# -- the end of the program --------------------------------------------------------------------------------------------

Formed = tuple[str, int, Address | None, Address | None]
"""The backend of a world, the rank in it, its master and its directory."""
_worlds: dict[Group, tuple[str, Formed | None]] = {}
"""Worlds that are open, with the place in the program that formed them, and how. One that nobody holds any more still
says goodbye at the end of the program."""
ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def close_at_exit(group: Group, formed: Formed | None = None) -> None:
    """Closes the group of a world at the end of the program, and tells its ranks if an exception ends this one."""
    from .group.tracking import call_site

    _worlds[group] = (call_site.describe_site(call_site.find()), formed)
    group._closers.append(functools.partial(_forget, group))
    _watch_exceptions()
    # Once more for each world, because the last function registered runs first: a world closes before what its backend
    # has registered, which is the end of MPI.
    atexit.unregister(close_worlds)
    atexit.register(close_worlds)


def _forget(group: Group) -> None:
    _worlds.pop(group, None)


@functools.cache  # once per process
def _watch_exceptions() -> None:
    """Tells the other ranks when an exception leaves this program, and shows it without Phalanx's frames."""
    previous: ExceptHook = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _recognise(error)
        try:
            abort_worlds(error)
        finally:
            if frames_are_hidden():
                hide_frames(error)
                say(error, lambda: previous(kind, error, error.__traceback__))
            else:
                previous(kind, error, trace)
        if lost_peer(error) is not None:
            _let_the_culprit_end_first()

    sys.excepthook = hook


def _recognise(error: BaseException) -> None:
    """Marks an error that torch's C++ has made of one of ours, which has nothing of it but the text."""
    if type(error) is not RuntimeError or hasattr(error, "phalanx_error"):
        return
    for group in list(_worlds):
        cause = group._health.cause
        if isinstance(cause, PeerLost) and f"rank {cause.peer} " in str(error) and cause.reason in str(error):
            error.phalanx_error = cause  # type: ignore[attr-defined]


TORCHRUN_LOOKS = 2.0
"""Seconds after which torchrun has surely seen that a rank has failed; it looks ten times a second."""


def _let_the_culprit_end_first() -> None:
    """Under torchrun, waits to be ended by it.

    torchrun takes the rank whose end it sees first for the root cause. A rank that only lost another is often done
    sooner than the one that raised, and torchrun would name the wrong one in the last lines that its user reads.
    """
    started = started_as()
    if started is not None and started[0].name == "torchrun":
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(TORCHRUN_LOOKS)


def abort_worlds(error: BaseException) -> None:
    """Tells the ranks of all open worlds that this one ends by an exception."""
    for group in list(_worlds):
        with contextlib.suppress(Exception):
            from .group.hints import add_hint

            add_hint(error, type(group))
            group.backend.check_usable()
            if group.backend.control.slate is not None:
                group.backend.control.slate.fail(_place_of(error))
            group.backend.control.abort(f"it raised {describe(error)}", user_traceback(error), lost_peer(error))


def _place_of(error: BaseException) -> str:
    """The line of the user's own files that raised it; "" if there is none."""
    from .group.tracking.call_site import is_users

    users = [frame for frame in extract_tb(error.__traceback__) if is_users(frame.filename)]
    return f"{Path(users[-1].filename).name}:{users[-1].lineno} in {users[-1].name}" if users else ""


def _refuse_second(name: str, launch: Launch) -> None:
    """Refuses to join the world that this process is in, where its rank is taken.

    Raises:
        RendezvousError: Says where that world was formed.
    """
    for group, (site, formed) in list(_worlds.items()):
        if group.backend.forked:
            continue  # the parent's
        if group.world_size > 1 and formed == (name, launch.rank, launch.master, launch.directory):
            raise RendezvousError(
                f"this process is in this world already, formed by init() at {site} (use the group that it returned, "
                "or close() it first)"
            )


@functools.cache  # once per process
def _warn_of_unknown_variables() -> None:
    for name in unknown_variables():
        meant = nearest_variable(name)
        if meant is not None:  # what is like none of them may be another program's; `phalanx doctor` names it
            warnings.warn(f"nothing reads the environment variable {name} (did you mean {meant}?)", stacklevel=5)


def close_worlds() -> None:
    """Closes all open worlds: the end of a program."""
    for group in list(_worlds):
        with contextlib.suppress(Exception):
            group.close()
