"""Clients without a page of their own: torchmetrics, dask, joblib, pytest, and a program that was mpi4py's."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from tests.launchers.processes import Jobs, finish_all
from tests.launchers.starting import needs_mpirun
from tests.mpi.starting import Starter
from tests.recipes.clients import Client, recipe, said

HERE = Path(__file__).with_name("programs")
MPI4PY = Path(sys.prefix) / "mpi4py"
"""Apart from the other clients: the Makefile says why."""
pytestmark = recipe()


def skip_without(*packages: str) -> pytest.MarkDecorator:
    return recipe(*packages)[-1]


@skip_without("torchmetrics")
def test_torchmetrics_finds_what_it_finds_on_gloo(client: Client) -> None:
    own, stock = (
        client.run("phalanx", "run", "-n", "2", HERE / "metrics.py", backend) for backend in ("phalanx", "gloo")
    )
    assert "ranks on PhalanxProcessGroup" in own
    assert "ranks on ProcessGroup" in stock
    assert said(own) == said(stock) != []


@pytest.mark.parametrize("pool", [pytest.param(name, marks=skip_without(name)) for name in ("dask", "joblib")])
def test_tasks_of_a_pool_form_worlds(client: Client, pool: str) -> None:
    output = client.run("python", HERE / "pool_tasks.py", pool)
    assert said(output) == ["[(0, 6.0), (1, 6.0), (2, 6.0)]"] * 2


def test_marked_tests_run_on_ranks(client: Client, jobs: Jobs) -> None:
    shutil.copy(HERE / "marked.py", jobs.folder / "test_marked.py")
    output = client.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_marked.py")
    assert re.search(r"^3 passed\b", output, re.M)


@needs_mpirun("openmpi")
@pytest.mark.skipif(not MPI4PY.exists(), reason="mpi4py is not installed (make test-recipes does so)")
def test_a_port_from_mpi4py_finds_the_same(client: Client, jobs: Jobs) -> None:
    starter = Starter("openmpi", jobs)
    by_mpi = [starter.start(4, HERE / f"heat_{name}.py", PYTHONPATH=str(MPI4PY)) for name in ("mpi4py", "phalanx")]
    finish_all(by_mpi)
    found = said(by_mpi[0].out)
    assert found != []
    assert said(by_mpi[1].out) == found
    assert said(client.run("phalanx", "run", "-n", "4", HERE / "heat_phalanx.py")) == found
