"""Messages through MPI: those that are too long to travel in their heads, and those that the call does not wait for."""

from __future__ import annotations

import pytest
from tests.mpi.starting import Starter, on_each_mpi


@pytest.mark.parametrize("mpirun", on_each_mpi, indirect=True)
def test_long_messages_keep_what_is_promised(mpirun: Starter) -> None:
    job = mpirun.start(3, "-m", "tests.mpi.long_messages")
    assert job.finish() == 0, job.out + job.err
    assert job.out.count("all of them ran") == 3


@pytest.mark.parametrize("mpirun", on_each_mpi, indirect=True)
def test_posted_messages_keep_what_is_promised(mpirun: Starter) -> None:
    job = mpirun.start(3, "-m", "tests.group.posted_messages", "mpi")
    assert job.finish() == 0, job.out + job.err
    assert job.out.count("all of them ran") == 3
