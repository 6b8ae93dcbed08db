"""The conformance suite and the property tests of the collectives under both MPIs: one job per number of ranks."""

from __future__ import annotations

import json

import pytest
from tests.mpi.starting import Starter, on_each_mpi

from phalanx.testing import conformance

PROPERTIES = 12
CROSSED = [
    pytest.param(ranks, *one.values, id=f"{ranks}-{one.id}", marks=[*one.marks, *([pytest.mark.slow] if rare else [])])
    for ranks, usual in ((2, "mpich"), (4, "openmpi"))
    for one in on_each_mpi
    for rare in [one.id != usual]
]
"""Each number of ranks and each library once; with `-m slow` also the others."""


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("ranks", "mpirun"), CROSSED, indirect=["mpirun"])
def test_every_check_and_every_property(mpirun: Starter, ranks: int) -> None:
    report = mpirun.folder / "report.json"
    job = mpirun.start(ranks, "-m", "tests.mpi.suite", report)
    code = job.finish(170)
    assert report.exists(), job.out + job.err
    results = json.loads(report.read_text())
    failed = {name: text for name, text in results.items() if text}
    assert not failed, "\n\n".join(f"{name}\n{text}" for name, text in failed.items())
    wanted = {check.name for check in conformance.checks() if check.ranks <= ranks}
    assert wanted <= results.keys()
    assert sum(name.startswith("test_") for name in results) == PROPERTIES
    modes = {name.partition(": ")[0] for name in results if ": " in name}
    assert modes == ({"apart", "unchecked"} if ranks > 2 else set())
    assert code == 0, job.out + job.err


@pytest.mark.parametrize("mpirun", on_each_mpi, indirect=True)
def test_an_mpi_that_lets_one_thread_in_at_a_time(mpirun: Starter) -> None:
    report = mpirun.folder / "report.json"
    job = mpirun.start(4, "-m", "tests.mpi.suite", report, "serialized")
    code = job.finish(100)
    assert report.exists(), job.out + job.err
    results = json.loads(report.read_text())
    failed = {name: text for name, text in results.items() if text}
    assert not failed, "\n\n".join(f"{name}\n{text}" for name, text in failed.items())
    assert "serialized: collectives.crossing" in results
    assert code == 0, job.out + job.err
