"""Memory that processes of one user on one host share: an anonymous file, with no name to guess or to leave behind.

Who makes it tells the other its process and descriptor over a connection that is authenticated. The other opens that
descriptor through /proc, which the kernel allows to the same user only, and makes sure that it is what was meant before
it maps it: a descriptor may have been closed, and its number be another file's by now.
"""

from __future__ import annotations

import fcntl
import hmac
import os
import secrets
import stat

__all__ = ["NONCE_BYTES", "NotTheMemory", "make_memory", "open_memory"]

NONCE_BYTES = 16
"""The memory begins with so many random bytes, which only those who were told know."""
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if hasattr(fcntl, "F_SEAL_SHRINK") else 0
"""Without them, another process could cut the memory off under our feet. Files on disk have none."""


class NotTheMemory(OSError):
    """The descriptor is another file, or memory that is not as it was said to be."""


def make_memory(name: str, size: int) -> tuple[int, bytes]:
    """The descriptor of new memory of a fixed size, and the random bytes that it begins with.

    Args:
        name: Shown by /proc, and of no other use.

    Raises:
        OSError: There is none.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        os.pwrite(fd, nonce, 0)
    except BaseException:
        os.close(fd)
        raise
    return fd, nonce


def open_memory(pid: int, number: int, size: int, nonce: bytes) -> int:
    """A descriptor of the memory that another process has as `number`, for the caller to close.

    Raises:
        NotTheMemory: That descriptor is something else.
        OSError: It cannot be opened.
    """
    # First without touching what is there: opening a device or a pipe could do things, or wait.
    path = os.open(f"/proc/{pid}/fd/{number}", os.O_PATH | os.O_CLOEXEC)
    try:
        found = os.fstat(path)
        if not stat.S_ISREG(found.st_mode):
            raise NotTheMemory(f"descriptor {number} of process {pid} is not memory")
        if found.st_uid != os.geteuid():
            raise NotTheMemory(f"descriptor {number} of process {pid} belongs to user {found.st_uid}")
        fd = os.open(f"/proc/self/fd/{path}", os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.close(path)
    try:
        if not _is_sealed(fd):
            raise NotTheMemory(f"descriptor {number} of process {pid} is not sealed memory")
        if os.fstat(fd).st_size != size:
            raise NotTheMemory(f"descriptor {number} of process {pid} does not have {size} bytes")
        if not hmac.compare_digest(os.pread(fd, NONCE_BYTES, 0), nonce):
            raise NotTheMemory(f"descriptor {number} of process {pid} is other memory than was offered")
    except BaseException:
        os.close(fd)
        raise
    return fd


def _is_sealed(fd: int) -> bool:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:
        return False
