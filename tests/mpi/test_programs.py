"""Programs that know nothing of MPI run on it unchanged, and what is missing is named."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.mpi.starting import Starter, on_each_mpi

import phalanx as px
from phalanx import config


@pytest.mark.parametrize("mpirun", on_each_mpi, indirect=True)
def test_examples_the_demo_training_and_remote_calls(mpirun: Starter) -> None:
    job = mpirun.start(2, "-m", "tests.mpi.programs", PHALANX_BACKEND="mpi")
    assert job.finish() == 0, job.out + job.err
    assert job.out.count("all of them ran") == 2
    assert "The sum of all ranks went around the ring: 1" in job.out


WITHOUT = """
import sys
sys.modules["mpi4py"] = None
import phalanx as px
try:
    px.init("mpi")
except px.BackendUnavailable as error:
    print(error)
"""


def test_without_mpi4py_the_extra_is_named() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=60, check=False)
    assert "pip install mpi4py" in done.stdout, done.stdout + done.stderr


def test_rank_and_size_are_mpis() -> None:
    with pytest.raises(px.ConfigError, match="takes rank and world size from MPI"):
        px.init("mpi", rank=0, world_size=1)
    with pytest.raises(px.ConfigError, match="auth='none' does not go with a token"):
        px.init("mpi", auth="none", token="secret")


def test_options_that_mpi_cannot_keep_are_refused() -> None:
    with pytest.raises(px.ConfigError, match="cannot encrypt"):
        px.init("mpi", options=px.Options(tls=px.TlsOptions(certificate="a", key="b", ca="c")))
    with pytest.raises(px.ConfigError, match="algorithms are MPI's own"):
        px.init("mpi", options=px.Options(algorithm="all_reduce=ring"))


def test_the_variable_says_what_auto_means() -> None:
    assert config.backend_of_choice({}) == "mesh"
    assert config.backend_of_choice({"PHALANX_BACKEND": "MPI"}) == "mpi"
    assert config.backend_of_choice({"PHALANX_BACKEND": "auto"}) == "mesh"
    with pytest.raises(px.ConfigError, match=r"PHALANX_BACKEND='nccl' is not valid \(expected auto, mesh, tcp, mpi\)"):
        config.backend_of_choice({"PHALANX_BACKEND": "nccl"})


def test_importing_the_backend_imports_no_mpi() -> None:
    found = subprocess.run(
        [sys.executable, "-c", "import sys; from phalanx.backends import MpiBackend; print('mpi4py' in sys.modules)"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert found.stdout.strip() == "False"
