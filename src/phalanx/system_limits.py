"""Errors of the operating system that mean a limit, as errors of ours that name it.

They are mapped once, where a public call ends: below, code does not look at them.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from .errors import OutOfResources, PhalanxError

try:
    import resource
except ImportError:  # not on every platform
    resource = None  # type: ignore[assignment]

__all__ = ["naming_limits", "out_of_resources", "raise_limit"]

_NO_THREAD = "can't start new thread"


def out_of_resources(error: BaseException) -> OutOfResources | None:
    """The error to raise for one that means a limit of the system; None for any other."""
    if isinstance(error, PhalanxError):
        return None
    if isinstance(error, RuntimeError) and str(error) == _NO_THREAD:
        words = f"no thread can be started: the limit on processes and threads is {_limit('RLIMIT_NPROC')}"
        return OutOfResources(f"{words} (raise it: ulimit -u)", errno=errno.EAGAIN)
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EMFILE:
        limit = _limit("RLIMIT_NOFILE")
        words = f"this process has as many files and connections open as it may: {limit} (RLIMIT_NOFILE; ulimit -n)"
    elif number == errno.ENFILE:
        words = "no more files can be opened on this machine (raise the sysctl fs.file-max)"
    elif number in (errno.ENOMEM, errno.ENOBUFS):
        words = f"{os.strerror(number)}: the limit on this process's memory is {_limit('RLIMIT_AS')} (ulimit -v)"
    else:
        return None
    return OutOfResources(words, errno=number)


@contextlib.contextmanager
def naming_limits() -> Iterator[None]:
    """Raises `OutOfResources` in place of the system's own error, for the length of a public call."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise_limit(error)
        raise


def raise_limit(error: BaseException) -> None:
    """Raises `OutOfResources` for an error that means a limit; does nothing for any other.

    For the `except` of a public call that is too quick to be surrounded by `naming_limits`.
    """
    limit = out_of_resources(error)
    if limit is not None:
        raise limit from error


def _limit(name: str) -> str:
    """The soft limit of this process."""
    if resource is None or not hasattr(resource, name):
        return "unknown"
    soft = resource.getrlimit(getattr(resource, name))[0]
    return "not set" if soft == resource.RLIM_INFINITY else str(soft)
