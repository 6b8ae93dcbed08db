"""Which machine this is, as far as two ranks must agree on it."""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path

__all__ = ["host_id", "hostname", "memory_id", "process_start"]


@functools.lru_cache(maxsize=1)
def host_id() -> str:
    """The same in all processes that share a kernel and a network namespace, different elsewhere.

    Two containers on one machine with networks of their own count as two hosts: loopback does not connect them.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return socket.gethostname()
    return f"{boot}/{network}"


def memory_id(version: int) -> str:
    """The same in all processes that can open each other's files through /proc; empty where there is no such way.

    Args:
        version: Of the memory's layout: whoever has another one cannot take part.
    """
    try:
        processes = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return ""
    return f"{processes}/{os.geteuid()}/{version}"


def hostname() -> str:
    """The name for people."""
    return socket.gethostname()


def process_start(pid: int) -> int | None:
    """When a process of this machine began, in clock ticks.

    None if there is none. Tells a reused pid from the first one.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])
