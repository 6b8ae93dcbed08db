"""The first code that runs in the directory's process.

Run as a program (`python -I -S bootstrap.py HOW LISTENER LINK PATH…`). It inherits the listening socket, and one end of
a socket pair to its host, over which everything else comes, the token too.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

__all__ = ["ATTACHED", "DETACHED"]

ATTACHED, DETACHED = "attached", "detached"


def main(arguments: list[str]) -> None:
    """Serves until the end of the job."""
    how, listener, link, *paths = arguments
    if how == DETACHED and os.fork():
        os._exit(0)  # so the host's program has no child that it does not know of, and that `os.wait` would wait for
    # A batch system that tells a job to end tells all of its processes, and the ranks may take their time.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    _take_descriptors()
    sys.path += paths

    from phalanx.rendezvous.hosting.service import serve

    serve(socket.socket(fileno=int(listener)), socket.socket(fileno=int(link)))


def _take_descriptors() -> None:
    """Lets this process open as many connections as it may: each rank has two."""
    try:
        import resource
    except ImportError:  # not on every platform
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    main(sys.argv[1:])
