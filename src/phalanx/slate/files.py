"""The files of slates: where they lie, what they are called, and when they go.

A slate is `JOB.RANK.PID` in a folder that only this user can enter, in shared memory where there is some. A rank that
ends well removes its own, or leaves that to the launcher that watches it. What a failure leaves behind is kept until
the next one, for `phalanx doctor --last`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..config import memory_dir
from ..errors import ConfigError
from ..operating_system import memory_namespace, process_started, reserve
from . import layout

__all__ = [
    "SlateFile",
    "is_written",
    "job_of",
    "listed",
    "make_file",
    "remove",
    "shares_processes",
    "tidy",
    "why_no_room",
]

TRIES = 200
SILENCE = 60.0
"""Seconds without a beat after which a process that cannot be looked at is taken for ended."""


@dataclass(frozen=True)
class SlateFile:
    """A slate on this machine."""

    path: Path
    job: str
    rank: int
    pid: int

    def read(self) -> bytes | None:
        """Its contents now; None if it is gone, damaged, not this user's own, or of another version."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size != layout.SIZE:
                return None
            data = os.pread(fd, layout.SIZE, 0)
        except OSError:
            return None
        finally:
            os.close(fd)
        return data if layout.is_whole(data) else None

    @property
    def is_alive(self) -> bool:
        """True while the process that writes it runs."""
        data = self.read()
        return is_written(data) if data is not None else self._may_be_new

    @property
    def _may_be_new(self) -> bool:
        """True if a slate that cannot be read may be one that is just being made, or that of another version."""
        try:
            age = time.time() - self.path.stat().st_mtime
        except OSError:
            return False
        return age < SILENCE or process_started(self.pid) is not None

    @property
    def state(self) -> int:
        """The state that the rank has noted."""
        data = self.read()
        return layout.CLOSED if data is None else int.from_bytes(data[28:32], "little")

    @property
    def ended_well(self) -> bool:
        """True if the rank has closed its world, and its job has not failed afterwards."""
        data = self.read()
        return data is None or (self.state == layout.CLOSED and not text(data, "failure"))

    def note_failure(self, words: str) -> None:
        """Notes why the job has failed, once its rank has ended."""
        kind, at = layout.HEADER.fields["failure"][:2]  # type: ignore[index]
        with contextlib.suppress(OSError):
            fd = os.open(self.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                os.pwrite(fd, words.encode(errors="replace")[: kind.itemsize - 1], at)
            finally:
                os.close(fd)


def is_written(data: bytes) -> bool:
    """True while the process runs that writes a slate with these contents."""
    if shares_processes(data):
        pid = int.from_bytes(data[16:20], "little")
        return text(data, "process_started") == (process_started(pid) or "")
    beat_ns = int.from_bytes(data[80:88], "little")
    return time.monotonic_ns() - beat_ns < SILENCE * 1e9


def shares_processes(data: bytes) -> bool:
    """True unless a slate is that of a container that numbers its processes by itself, and only shares its memory."""
    return text(data, "process_namespace") in ("", str(memory_namespace() or ""))


def text(data: bytes, field: str) -> str:
    """A text of the header."""
    kind, at = layout.HEADER.fields[field][:2]  # type: ignore[index]
    return data[at : at + kind.itemsize].split(b"\0", 1)[0].decode(errors="replace")


def job_of(token: bytes | None, directory: str) -> str:
    """The name of a job: the same on all its ranks and launchers. It does not tell the token."""
    return hashlib.sha256(b"phalanx slate " + (token if token is not None else directory.encode())).hexdigest()[:12]


def make_file(job: str, rank: int) -> tuple[Path, int]:
    """Makes the file of a rank, with all of its memory reserved. The caller closes the descriptor.

    Raises:
        OSError, ConfigError: There is no place for it.
    """
    path = Path()
    for _ in range(TRIES):
        path = memory_dir() / f"{job}.{rank}.{os.getpid()}"
        with contextlib.suppress(FileNotFoundError):  # another rank has just removed the empty folder
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            break
    else:
        raise FileNotFoundError(path)
    try:
        reserve(fd, layout.SIZE)
    except BaseException:
        os.close(fd)
        remove(path)
        raise
    return path, fd


def why_no_room(count: int) -> str:
    """Why so many slates do not fit on this machine; empty if they do."""
    try:
        folder = memory_dir()
        found = os.statvfs(folder)
    except (OSError, ConfigError) as error:
        return str(error)
    with contextlib.suppress(OSError):
        folder.rmdir()  # if it was made just now, to look at it
    room, needed = found.f_bavail * found.f_frsize, count * layout.SIZE
    if found.f_blocks and room < needed:  # a system without a limit says 0 blocks
        return f"{folder} has room for {room >> 10} KiB, and they need {needed >> 10}"
    if found.f_files and found.f_favail < count:
        return f"{folder} has room for {found.f_favail} files, and they need {count}"
    return ""


def listed() -> Iterator[SlateFile]:
    """The slates on this machine, of this user."""
    try:
        folder = memory_dir()
        names = sorted(os.listdir(folder))
    except (OSError, ConfigError):
        return
    if not names:  # it was made just now, to look into it
        with contextlib.suppress(OSError):
            folder.rmdir()
    for name in names:
        job, _, rest = name.partition(".")
        rank, _, pid = rest.partition(".")
        if name.isascii() and rank.isdigit() and pid.isdigit():
            yield SlateFile(folder / name, job, int(rank), int(pid))


def remove(path: Path) -> None:
    """Removes a slate, and the folder with the last one."""
    with contextlib.suppress(OSError):
        path.unlink()
    with contextlib.suppress(OSError):
        path.parent.rmdir()


def tidy(*, but: str = "") -> None:
    """Removes what ended jobs have left behind, except for the failed one that ended last.

    Args:
        but: A job to keep in any case.
    """
    jobs: dict[str, list[SlateFile]] = {}
    for file in listed():
        jobs.setdefault(file.job, []).append(file)
    failed: list[tuple[float, str]] = []
    for job, files in jobs.items():
        if job == but or any(file.is_alive for file in files):
            continue
        if all(file.ended_well for file in files):
            for file in files:
                remove(file.path)
        else:
            with contextlib.suppress(OSError):
                failed.append((max(file.path.stat().st_mtime for file in files), job))
    for _, job in sorted(failed)[:-1]:
        for file in jobs[job]:
            remove(file.path)
