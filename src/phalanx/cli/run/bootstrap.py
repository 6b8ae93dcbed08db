"""The first program of a rank's process: it ties its life to the launcher's, then becomes the rank's command.

Run as a program (`python -I -S bootstrap.py LAUNCHER_PID COMMAND…`), so it imports nothing but the standard library. It
is a program and not a `preexec_fn`, because Python code between fork and exec may deadlock where there are threads.
"""

from __future__ import annotations

import os
import signal
import sys

__all__ = ["PR_SET_CHILD_SUBREAPER", "PR_SET_PDEATHSIG", "prctl"]

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def prctl(option: int, value: int) -> bool:
    """Linux's `prctl(option, value)`; False where there is no such thing."""
    if sys.platform != "linux":
        return False
    try:
        import ctypes

        return int(ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)) == 0
    except (ImportError, AttributeError, OSError):
        return False  # the guardian still ends the rank


def main(arguments: list[str]) -> int:
    """Becomes the command; returns only if that is impossible."""
    launcher, command = int(arguments[0]), arguments[1:]
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # A launcher that died before the line above sends no signal any more, but this process has another parent then.
    if os.getppid() != launcher:
        return 1
    try:
        os.execv(command[0], command)  # noqa: S606 - becoming another program is the point
    except OSError as error:
        sys.stderr.write(f"phalanx: cannot run {command[0]}: {error.strerror}\n")
    return 126


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
