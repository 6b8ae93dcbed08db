"""Messages through MPI that are too long to travel in their heads."""

from __future__ import annotations

import pytest
from tests.mpi.starting import Starter, on_each_mpi


@pytest.mark.parametrize("mpirun", on_each_mpi, indirect=True)
def test_long_messages_keep_what_is_promised(mpirun: Starter) -> None:
    job = mpirun.start(3, "-m", "tests.mpi.long_messages")
    assert job.finish() == 0, job.out + job.err
    assert job.out.count("all of them ran") == 3
