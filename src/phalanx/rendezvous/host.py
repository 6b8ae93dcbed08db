"""Which machine this is, as far as two ranks must agree on it."""

from __future__ import annotations

import functools
import os
import socket

from ..operating_system import host_identity, memory_namespace

__all__ = ["host_id", "hostname", "memory_id"]


@functools.lru_cache(maxsize=1)
def host_id() -> str:
    """The same in all processes that share a kernel and a network namespace, different elsewhere.

    Two containers on one machine with networks of their own count as two hosts: loopback does not connect them.
    """
    return host_identity()


def memory_id(version: int) -> str:
    """The same in all processes that can open each other's files through /proc; empty where there is no such way.

    Args:
        version: Of the memory's layout: whoever has another one cannot take part.
    """
    processes = memory_namespace()
    return "" if processes is None else f"{processes}/{os.geteuid()}/{version}"


def hostname() -> str:
    """The name for people."""
    return socket.gethostname()
