"""Finds every process of a job, and ends them all should the launcher be killed.

A process belongs to a job if `PHALANX_RUN_ID` in its environment starts with the job's id (a job started inside a job
adds its own part to the id), or if it descends from one that does. So a grandchild in its own session is found too.

As a program (`python -I -S guardian.py RUN_ID FOLDER [GRACE]`) it is the guardian: it waits on its standard input,
whose other end only the launcher holds. A byte means that the job is over; the end of the pipe without one means that
the launcher was killed: then it also removes the launcher's folder. It imports nothing but the standard library and one
file of ours, so that it starts at once and stays small.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

if __package__:
    from phalanx.operating_system import process_table
else:  # behind the standard library, of which no module may be hidden
    sys.path.append(os.path.abspath(f"{__file__}/../.."))
    from operating_system import process_table  # type: ignore[import-not-found,no-redef]

__all__ = ["MARK", "Process", "end_all", "processes", "relatives", "send"]

MARK = "PHALANX_RUN_ID"
KILL_INTERVAL = 0.02
"""Seconds between two looks for processes that were forked while others were being killed."""
LOOK_INTERVAL = 0.1
"""Seconds between two looks whether the ranks have ended by themselves."""
KILL_LIMIT = 5.0
"""Seconds after which a process that does not even die of SIGKILL (it hangs in the kernel) is given up."""


class Process(NamedTuple):
    """One line of the process table."""

    pid: int
    parent: int
    session: int
    run_id: str


def processes() -> list[Process]:
    """All processes that are alive."""
    return [Process(*row) for row in process_table(MARK)]


def relatives(
    run_id: str, *, table: list[Process] | None = None, roots: Iterable[int] = (), spare: Iterable[int] = ()
) -> set[int]:
    """The processes of a job.

    Args:
        run_id: The job's id.
        table: What `processes` gave, to save another look.
        roots: Processes whose session and descendants belong to the job too, whatever their environment says.
        spare: Processes that do not belong to it, nor does what descends from them. The caller is spared anyway.
    """
    spared = {os.getpid(), *spare}
    known = set(roots)
    table = processes() if table is None else table
    members = {
        p.pid
        for p in table
        if p.pid in known or p.session in known or p.run_id == run_id or p.run_id.startswith(f"{run_id}.")
    }
    members -= spared
    grown = True
    while grown:
        children = {p.pid for p in table if p.parent in members} - spared
        grown = not children <= members
        members |= children
    return members


def send(number: int, pids: Iterable[int]) -> None:
    """Sends a signal to each process that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def end_all(find: Callable[[], set[int]], between: Callable[[], object] = lambda: None) -> set[int]:
    """Kills what `find` finds until there is nothing left.

    Args:
        find: Gives the processes that are alive now.
        between: Called between two rounds (the launcher reaps its children there).

    Returns:
        Those that could not be ended.
    """
    give_up = time.monotonic() + KILL_LIMIT
    clean = 0
    # Two clean looks: a process that is just replacing its image shows no environment for a moment.
    while clean < 2:
        left = find()
        if left and time.monotonic() > give_up:
            return left
        clean = 0 if left else clean + 1
        send(signal.SIGKILL, left)
        time.sleep(KILL_INTERVAL if left else KILL_INTERVAL / 4)
        between()
    return set()


def main(run_id: str, folder: str, grace: str = "0") -> int:
    """Waits for the end of the job or of the launcher.

    Args:
        grace: Seconds that the ranks have to end by themselves, once the launcher is gone.
    """
    # A signal to the launcher's whole process group must not end the process that cleans up.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    if not os.read(0, 1):
        until = time.monotonic() + float(grace)
        while time.monotonic() < until and relatives(run_id):
            time.sleep(LOOK_INTERVAL)
        end_all(lambda: relatives(run_id))
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
