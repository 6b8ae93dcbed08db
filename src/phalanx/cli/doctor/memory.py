"""Shared memory: the folder that other libraries use, and the nameless kind that Phalanx itself uses."""

from __future__ import annotations

import mmap
import os
import tempfile

from phalanx.operating_system import LINUX, make_memory_file

from .findings import Finding, Situation, check, ok, problem, warning
from .limits import size

__all__ = ["memory_file", "shared_memory"]

_COMFORT = 256 << 20
"""Bytes. A container gets 64 MiB unless told otherwise, which a few data-loader workers fill."""


@check("shared memory")
def shared_memory(situation: Situation) -> Finding:
    """The folder for shared memory: is it there, is it writable, how much is free."""
    topic = "shared memory"
    path = situation.shm
    if not LINUX:
        return ok(topic, "this system has no folder for it; nothing here needs one")
    try:
        room = os.statvfs(path)
    except OSError as error:
        return warning(
            topic,
            f"{path} cannot be used: {error.strerror}",
            "Phalanx does not need this folder, but PyTorch's data loaders and Python's multiprocessing do. "
            f"Mount a tmpfs there (mount -t tmpfs tmpfs {path}).",
        )
    total, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    found = f"{path}: {size(free)} free of {size(total)}"
    try:
        # A real attempt: mode bits do not tell of a read-only mount, a full inode table or a security module.
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"\0" * 4096)
            file.flush()
    except OSError as error:
        return problem(
            topic,
            f"{found}, but nothing can be written there: {error.strerror}",
            "Locks of Python's multiprocessing and PyTorch's data loaders fail without it. Make it writable "
            f"(chmod 1777 {path}), "
            "free some room (ls -l shows who filled it), or mount it read-write.",
        )
    if free < _COMFORT:
        return warning(
            topic,
            found,
            "Little: PyTorch's data loaders, NCCL and MPI die with 'Bus error' when it is full. Remove what "
            "ended jobs left there, or "
            "start the container with --shm-size=8g (--ipc=host also helps).",
        )
    return ok(topic, f"{found}, writable")


@check("memory files")
def memory_file(situation: Situation) -> Finding:
    """Whether a memfd can be made, sized, mapped and read back: what ranks on one host share without a name."""
    topic = "memory files"
    if not LINUX:
        return warning(
            topic,
            "this system has no memory files (memfd_create)",
            "Nothing to do: ranks on this host talk over TCP, only slower.",
        )
    try:
        descriptor = make_memory_file("phalanx-doctor", 1 << 20)
        try:
            with mmap.mmap(descriptor, 1 << 20) as first, mmap.mmap(descriptor, 1 << 20) as second:
                first[:5] = b"hello"
                seen = second[:5]
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        return warning(
            topic,
            f"memory cannot be shared through a memfd: {error}",
            "Ranks on this host talk over TCP, only slower. Usual causes: a limit on file sizes (ulimit -f "
            "unlimited) or on open files "
            "(ulimit -n), or a sandbox that forbids memfd_create.",
        )
    if seen != b"hello":
        return problem(
            topic,
            "two mappings of one memfd do not show the same bytes",
            "This kernel or sandbox cannot share memory: use another.",
        )
    return ok(topic, "memory can be shared without a name (memfd)")
