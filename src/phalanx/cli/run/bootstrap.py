"""The first program of a rank's process: it ties its life to the launcher's, then becomes the rank's command.

Run as a program (`python -I -S bootstrap.py LAUNCHER_PID COMMAND…`), so it imports nothing but the standard library and
one file of ours. It is a program and not a `preexec_fn`, because Python code between fork and exec may deadlock where
there are threads. With 0 for the launcher, the rank outlives it for a while.
"""

from __future__ import annotations

import os
import sys

# Behind the standard library, of which no module may be hidden.
sys.path.append(os.path.abspath(f"{__file__}/../../.."))
from operating_system import die_with_parent  # type: ignore[import-not-found]

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Becomes the command; returns only if that is impossible."""
    launcher, command = int(arguments[0]), arguments[1:]
    if launcher:
        die_with_parent()  # where that is impossible, the guardian still ends the rank
    # A launcher that died before the line above sends no signal any more, but this process has another parent then.
    if launcher and os.getppid() != launcher:
        return 1
    try:
        os.execv(command[0], command)  # noqa: S606 - becoming another program is the point
    except OSError as error:
        sys.stderr.write(f"phalanx: cannot run {command[0]}: {error.strerror}\n")
    return 126


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
