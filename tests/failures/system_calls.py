"""System calls that are refused or held up, by seccomp filters; and whether this machine lets processes read others."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import platform
import signal
import struct
import threading
from collections.abc import Callable

__all__ = ["READ_PEER", "forbid", "has_secret_memory", "hold_up", "refuse", "secret_memory", "siblings_can_read"]

_libc = ctypes.CDLL(None, use_errno=True)
_SECCOMP, READ_PEER = {"x86_64": (317, 310), "aarch64": (277, 270)}.get(platform.machine(), (0, 0))
"""The numbers of seccomp and of process_vm_readv."""
_MEMFD_SECRET = 447
_ALLOW, _ERRNO, _NOTIFY, _KILL = 0x7FFF0000, 0x00050000, 0x7FC00000, 0x80000000
_ALL_THREADS, _LISTENER = 1, 8
_RECEIVE, _ANSWER = 0xC0502100, 0xC0182101
_GO_ON = 1


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def _filter(call: int, answer: int, flags: int) -> int:
    """Has the kernel answer one system call so from now on; all others it does."""
    load, jump_if_equal, give = 0x20, 0x15, 0x06
    steps = [(load, 0, 0, 0), (jump_if_equal, 0, 1, call), (give, 0, 0, answer), (give, 0, 0, _ALLOW)]
    code = b"".join(struct.pack("=HBBI", *step) for step in steps)
    program = _Program(len(steps), code)
    no_new_privileges = 38
    _libc.prctl(no_new_privileges, 1, 0, 0, 0)
    result = int(_libc.syscall(_SECCOMP, 1, flags, ctypes.byref(program)))
    if result < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    return result


def refuse(call: int, error: int) -> None:
    """Has a system call fail in all threads of this process, for good."""
    _filter(call, _ERRNO | error, _ALL_THREADS)


def forbid(call: int) -> None:
    """Has a system call end this process, in all of its threads."""
    _filter(call, _KILL, _ALL_THREADS)


def hold_up(call: int, wait: Callable[[int], None]) -> None:
    """Holds a system call of this thread up, for good: the n-th time until `wait(n)` returns, in another thread."""
    listener = _filter(call, _NOTIFY, _LISTENER)

    def answer() -> None:
        count = 0
        while True:
            notice = bytearray(80)
            with contextlib.suppress(FileNotFoundError):  # a signal has interrupted the call, which is then made again
                fcntl.ioctl(listener, _RECEIVE, notice, True)
                wait(count := count + 1)
                fcntl.ioctl(listener, _ANSWER, struct.pack("=QqiI", *struct.unpack_from("=Q", notice), 0, 0, _GO_ON))

    threading.Thread(target=answer, daemon=True).start()


def secret_memory(size: int) -> int:
    """A descriptor of memory that this process can use, but that nobody else can read in it.

    Raises:
        OSError: This kernel has none.
    """
    fd = int(_libc.syscall(_MEMFD_SECRET, 0))
    if fd < 0:
        raise OSError(ctypes.get_errno(), "memfd_secret")
    os.ftruncate(fd, size)
    return fd


def has_secret_memory() -> bool:
    try:
        os.close(secret_memory(4096))
    except OSError:
        return False
    return True


class _Vector(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p), ("length", ctypes.c_size_t))


def siblings_can_read() -> bool:
    """Whether a child of this process can read the memory of another one, as ranks would."""
    if not READ_PEER:
        return False
    theirs, mine = ctypes.create_string_buffer(b"theirs"), ctypes.create_string_buffer(8)
    other = os.fork()
    if other == 0:
        signal.pause()
        os._exit(0)
    reader = os.fork()
    if reader == 0:
        here, there = _Vector(ctypes.addressof(mine), 6), _Vector(ctypes.addressof(theirs), 6)
        count = _libc.process_vm_readv(other, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        os._exit(0 if count == 6 else 1)
    status = os.waitpid(reader, 0)[1]
    os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)
    return status == 0
