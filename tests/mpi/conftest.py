"""Fixtures of the tests on MPI."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.launchers.processes import Jobs
from tests.mpi.starting import Starter

_YOUNG = 1.0
"""Seconds in which somebody may be about to map it."""


@pytest.fixture
def mpirun(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Starter]:
    """Starts Python under one MPI, given by name; fails if something of ours is left."""
    before = _shared_memory()
    jobs = Jobs(tmp_path)
    yield Starter(request.param, jobs)
    jobs.clean_up()
    _remove_unused(_shared_memory() - before)


def _shared_memory() -> set[Path]:
    """What MPIs have there."""
    return {path for kind in ("mpich_shm_*", "sm_segment.*") for path in Path("/dev/shm").glob(kind)}


def _remove_unused(paths: set[Path]) -> None:
    """An MPI whose ranks are killed leaves its memory behind. Other tests may run on the same MPI at the same time."""
    for path in paths:
        with contextlib.suppress(OSError):
            time.sleep(max(0.0, path.stat().st_mtime + _YOUNG - time.time()))
            if not _is_mapped(path):
                path.unlink()


def _is_mapped(path: Path) -> bool:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if str(path) in maps.read_text():
                return True
    return False
