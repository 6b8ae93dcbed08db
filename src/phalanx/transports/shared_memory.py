"""Memory that processes of one user on one host share: an anonymous file, with no name to guess or to leave behind.

The only place that has such memory made or opens that of another process, by `phalanx.operating_system`. The process
that makes it sends its process id and descriptor to the other one, over an authenticated connection. The other process
opens that descriptor through /proc, which the kernel allows to the same user only. It checks everything before it maps
anything: the descriptor may have been closed since, and its number may now be another file's.
"""

from __future__ import annotations

import hmac
import mmap
import os
import secrets
import stat

from ..operating_system import is_sealed, make_memory_file, memory_seals, open_descriptor_of

__all__ = ["NONCE_BYTES", "NotTheMemory", "make_memory", "map_memory", "open_memory"]

NONCE_BYTES = 16
"""Random bytes at the start of the memory. Only the processes that it was offered to know them."""
SEALS = memory_seals()
"""They fix the size: a process that touches memory which another one has cut off is killed. Disk files have none."""


class NotTheMemory(OSError):
    """The descriptor is another file, or other memory than was offered."""


def make_memory(name: str, size: int) -> tuple[int, bytes]:
    """Makes memory of a fixed size. Returns its descriptor and the random bytes that it begins with.

    Args:
        name: Shown in /proc; it has no other use.

    Raises:
        OSError: The system gives no memory, or no descriptor.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    fd = make_memory_file(name, size)
    try:
        os.pwrite(fd, nonce, 0)
    except BaseException:
        os.close(fd)
        raise
    return fd, nonce


def open_memory(pid: int, number: int, size: int, nonce: bytes) -> int:
    """Opens the memory that process `pid` has as descriptor `number`. The caller closes the descriptor it gets.

    Raises:
        NotTheMemory: That descriptor is something else.
        OSError: It cannot be opened.
    """

    def check(found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode):
            raise NotTheMemory(f"descriptor {number} of process {pid} is not shared memory")
        if found.st_uid != os.geteuid():
            raise NotTheMemory(
                f"descriptor {number} of process {pid} belongs to user {found.st_uid} (expected {os.geteuid()})"
            )

    fd = open_descriptor_of(pid, number, check)
    try:
        if not is_sealed(fd):
            raise NotTheMemory(f"descriptor {number} of process {pid} is not sealed shared memory")
        if (found_size := os.fstat(fd).st_size) != size:
            raise NotTheMemory(f"descriptor {number} of process {pid} has {found_size} bytes (expected {size})")
        if not hmac.compare_digest(os.pread(fd, NONCE_BYTES, 0), nonce):
            raise NotTheMemory(f"descriptor {number} of process {pid} holds other memory than was offered")
    except BaseException:
        os.close(fd)
        raise
    return fd


def map_memory(fd: int, size: int) -> mmap.mmap:
    """The memory itself. It stays mapped while somebody holds a view of it, also when the descriptor is closed."""
    return mmap.mmap(fd, size)
