"""Fixtures of the tests on MPI."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.launchers.processes import Jobs
from tests.mpi.starting import Starter


@pytest.fixture
def mpirun(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Starter]:
    """Starts Python under one MPI, given by name; fails if something is left."""
    jobs = Jobs(tmp_path)
    yield Starter(request.param, jobs)
    jobs.clean_up()
