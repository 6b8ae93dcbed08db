"""The private file through which ranks of one host share a token, where the launcher gave none.

Rank 0 writes it (mode 0600, in a folder that only this user can enter). The directory removes it once all ranks have
come. It also says where the directory listens, for launchers that name no master. A file whose writer is no longer
alive is left over from a crash and counts as absent.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import time
from pathlib import Path

import msgspec

from ..config import runtime_dir
from ..deadline import Deadline
from ..errors import RendezvousError, WorldNotFormed
from ..operating_system import process_started
from ..types import Address
from .host import host_id

__all__ = ["JobFile", "new_token", "path_of", "publish", "wait_for"]

PAUSE = 0.02
LONGEST_PAUSE = 0.2
MAX_SIZE = 4096


class JobFile(msgspec.Struct, frozen=True):
    """The contents of the file."""

    token: bytes
    pid: int
    started: str | None
    host_id: str
    directory: str | None = None
    """The address of the directory; None if it is the master's."""


_decode = msgspec.json.Decoder(JobFile).decode


def new_token() -> bytes:
    """A fresh random token."""
    return secrets.token_hex(32).encode()


def path_of(job: str) -> Path:
    """The path of a job's token file."""
    return runtime_dir() / f"job-{job}.token"


def publish(job: str, token: bytes, directory: Address | None) -> Path:
    """Writes the file in one step, over one that a crash left behind; the caller removes it at the end.

    Raises:
        RendezvousError: The folder cannot be written to.
    """
    path = path_of(job)
    content = JobFile(
        token, os.getpid(), process_started(os.getpid()), host_id(), str(directory) if directory else None
    )
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.encode(content))
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise RendezvousError(f"cannot write the job's token file {path}: {error} (or set PHALANX_TOKEN)") from None
    return path


def wait_for(job: str, deadline: Deadline, *, rank: int) -> JobFile:
    """Waits until rank 0 of this job has written the file.

    Raises:
        WorldNotFormed: It did not before the deadline.
        RendezvousError: There is a file, but others than this user can read or write it.
    """
    path = path_of(job)
    pause = PAUSE
    while True:
        found = _read(path)
        if found is not None:
            return found
        if deadline.remaining() <= pause:
            raise WorldNotFormed(
                f"rank {rank}: rank 0 has not written the job's token to {path} within {deadline.seconds:g} s. Is it "
                "running on this host, as the same user, with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT? If it "
                "is on another host, or has a PHALANX_TOKEN, set the same PHALANX_TOKEN on all ranks",
                missing=[0],
                seconds=deadline.seconds,
                rank=rank,
                operation="rendezvous",
            )
        time.sleep(pause)
        pause = min(pause * 1.5, LONGEST_PAUSE)


def _read(path: Path) -> JobFile | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a named pipe would wait for a writer
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RendezvousError(f"cannot read the job's token file {path}: {error}") from None
    try:
        info = os.fstat(fd)
        if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o077 or not stat.S_ISREG(info.st_mode):
            raise RendezvousError(
                f"the token file {path} is not private to this user (owner {info.st_uid}, "
                f"mode {stat.S_IMODE(info.st_mode):o}); remove it"
            )
        data = os.read(fd, MAX_SIZE)
    finally:
        os.close(fd)
    try:
        found = _decode(data)
    except msgspec.MsgspecError:
        return None
    alive = found.host_id == host_id() and process_started(found.pid) == found.started
    return found if alive else None
