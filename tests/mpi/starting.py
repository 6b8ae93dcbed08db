"""How a program is started under each MPI."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from tests.launchers.processes import Job, Jobs
from tests.launchers.starting import ROOT, mpirun, needs_mpirun

LIBRARIES = {"openmpi": "libmpi.so.40", "mpich": "libmpi.so.12"}
VENDORS = {"openmpi": "Open MPI", "mpich": "MPICH"}

needs_mpi4py = pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")
on_each_mpi = [pytest.param(name, id=name, marks=[needs_mpirun(name), needs_mpi4py]) for name in LIBRARIES]


class Starter:
    """Starts Python under one MPI."""

    def __init__(self, name: str, jobs: Jobs) -> None:
        self.name = name
        self.vendor = VENDORS[name]
        self.folder = jobs.folder
        self._jobs = jobs
        self._mpirun = mpirun(name)

    def start(
        self,
        ranks: int,
        *command: str | Path,
        options: tuple[str, ...] = (),
        through: tuple[str, ...] = (),
        **env: str,
    ) -> Job:
        """Starts ranks; `options` are mpirun's, `through` is a command that runs Python."""
        # A container's root is refused by Open MPI unless it insists, and two cores are fewer than four ranks.
        more = ("--map-by", ":OVERSUBSCRIBE") if self.name == "openmpi" else ()
        python = (*through, sys.executable)
        return self.start_alone(self._mpirun, *more, *options, "-n", str(ranks), *python, *command, **env)

    def start_alone(self, *command: str | Path, **env: str) -> Job:
        """Starts a program without mpirun."""
        env = {
            # mpi4py is one package for every MPI.
            "MPI4PY_LIBMPI": str(self._mpirun.parent.parent / "lib" / LIBRARIES[self.name]),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "TMPDIR": str(self.folder),
            **env,
        }
        return self._jobs.start(*command, env=env, cwd=ROOT)
