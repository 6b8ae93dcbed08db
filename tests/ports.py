"""Ports for the programs of tests that run at the same time.

What the kernel gave a socket that is closed again may be another's a moment later, and two tests that choose at random
may choose the same. So each worker has ports of its own, and goes round them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket

from phalanx.transports.tcp import UNASSIGNED

__all__ = ["free_port"]

WORKERS = 50
"""More than there are at a time: one that crashed is followed by one with a new number."""
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % WORKERS
_share = len(UNASSIGNED) // WORKERS
# By twos: some programs take the next port as well. Not from the first: there may be other runs on this machine.
_ports = UNASSIGNED[_worker * _share : (_worker + 1) * _share : 2]
_first = random.SystemRandom().randrange(len(_ports))
_mine = itertools.cycle([*_ports[_first:], *_ports[:_first]])


def free_port(host: str = "127.0.0.1") -> int:
    """A port for a program of this test, which may have the next one, too."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for after_another in (False, True):  # a port whose last connection ended a moment ago only if there is no other
        for port in itertools.islice(_mine, len(_ports)):
            with socket.socket(family) as one, socket.socket(family) as other, contextlib.suppress(OSError):
                for taken, number in ((one, port), (other, port + 1)):
                    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, after_another)
                    taken.bind((host, number))
                return port
    raise AssertionError(f"none of the {len(_ports)} ports of this worker is free")
