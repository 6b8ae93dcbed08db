"""The name of a job: the same for all its ranks on one host, another for every other job of this user or of others."""

from __future__ import annotations

import hashlib
import os

from ..operating_system import who_is

__all__ = ["digest", "launcher_process"]

# How the kernel names the processes of MPI launchers that ranks descend from (it keeps 15 characters).
_LAUNCHERS = ("hydra_", "mpiexec", "mpirun", "prte", "orted")


def digest(*parts: object) -> str:
    """Reduces what describes a job, and the user's number, to 32 hexadecimal digits that are safe as a file name."""
    # repr keeps ("a", "b") and ("a, b",) apart.
    return hashlib.sha256(repr((os.getuid(), *map(str, parts))).encode("utf-8", "surrogateescape")).hexdigest()[:32]


def launcher_process() -> str:
    """The MPI launcher that this process descends from, for launchers that give the job no name (MPICH's does not).

    All ranks of a job on one host descend from the same one, also through a wrapper script. The start time is part of
    it because process numbers come round again. Where that cannot be seen, the parent has to do.
    """
    launcher = None
    pid = os.getppid()
    while pid > 1:
        found = who_is(pid)
        if found is None:
            break
        name, parent, began = found
        if name.startswith(_LAUNCHERS):
            launcher = f"{pid}@{began}"  # perhaps only mpirun's helper: mpirun itself would be right above
        elif launcher is not None:
            break
        pid = parent
    return launcher or str(os.getppid())
