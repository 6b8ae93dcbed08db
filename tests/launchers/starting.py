"""How each launcher is asked to start four ranks of a script."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.launchers.processes import Job, Jobs
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
RANKS = 4

Start = Callable[[Jobs, list[str]], list[Job]]


def mpirun(name: str) -> Path:
    """Where a launcher of MPI is; `make test` installs both."""
    default = ROOT / ".venv-mpi" / name / "bin" / "mpirun"
    return Path(os.environ.get(f"PHALANX_TEST_{name.upper()}", default))


def needs_mpirun(name: str) -> pytest.MarkDecorator:
    path = mpirun(name)
    return pytest.mark.skipif(not path.exists(), reason=f"there is no {path} (make test installs it)")


needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


def by_phalanx(jobs: Jobs, command: list[str]) -> list[Job]:
    return [jobs.start(sys.executable, "-m", "phalanx", "run", "-n", str(RANKS), *command)]


def torchrun(jobs: Jobs, command: list[str], *options: str, **env: str) -> Job:
    return jobs.start(sys.executable, "-m", "torch.distributed.run", *options, *command, env=env)


def by_torchrun(jobs: Jobs, command: list[str]) -> list[Job]:
    return [torchrun(jobs, command, "--standalone", "--nproc-per-node", str(RANKS))]


def by_two_torchruns(jobs: Jobs, command: list[str], *, backend: str, token: str | None) -> list[Job]:
    """Two agents, as if they were two nodes. The second starts first: it has to wait for the other."""
    port = free_port()
    env = {} if token is None else {"PHALANX_TOKEN": token}

    def agent(node: int) -> Job:
        where = ("--rdzv-backend", backend, "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "7")
        rank = ("--node-rank", str(node)) if backend == "static" else ()
        size = ("--nnodes", "2", "--nproc-per-node", str(RANKS // 2))
        return torchrun(jobs, command, *size, *rank, *where, **env)

    return [agent(1), agent(0)]


def by_openmpi(jobs: Jobs, command: list[str]) -> list[Job]:
    # A container's root is refused otherwise, and two cores are fewer than four ranks.
    env = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "TMPDIR": str(jobs.folder)}
    options = ("--map-by", ":OVERSUBSCRIBE", "-n", str(RANKS))
    return [jobs.start(mpirun("openmpi"), *options, sys.executable, *command, env=env)]


def by_mpich(jobs: Jobs, command: list[str]) -> list[Job]:
    return [jobs.start(mpirun("mpich"), "-n", str(RANKS), sys.executable, *command)]


def by_slurm(jobs: Jobs, command: list[str]) -> list[Job]:
    """What srun sets for four tasks on one node."""
    common = {
        "SLURM_JOB_ID": str(free_port()),  # a number that no other job of this test has
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(RANKS),
        "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": str(RANKS),
        "SLURM_STEP_NODELIST": "node7",
        "SLURM_JOB_NODELIST": "node7",
    }
    each = [{"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)} for task in range(RANKS)]
    return [jobs.start(sys.executable, *command, env={**common, **own, "SLURM_TASK_PID": "1"}) for own in each]


def by_hand(
    jobs: Jobs, command: list[str], *, ranks: int = RANKS, special: Mapping[int, dict[str, str]] = {}, **more: str
) -> list[Job]:
    """The variables of torch's `env://`, and nothing else. The last rank goes first.

    Args:
        special: More variables for some ranks.
        more: More variables for all.
    """
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **more}
    each = [{**common, "RANK": str(rank), **special.get(rank, {})} for rank in range(ranks)]
    return [jobs.start(sys.executable, *command, env=env) for env in reversed(each)]


def by_hand_with_token(jobs: Jobs, command: list[str]) -> list[Job]:
    return by_hand(jobs, command, PHALANX_TOKEN="a secret of this job")


@dataclass(frozen=True)
class Launcher:
    """A way to start four ranks."""

    name: str
    """What Phalanx calls it."""
    start: Start


def _param(identity: str, launcher: str, start: Start, *marks: pytest.MarkDecorator) -> object:
    return pytest.param(Launcher(launcher, start), id=identity, marks=marks)


LAUNCHERS = [
    _param("phalanx", "phalanx", by_phalanx),
    _param("torchrun", "torchrun", by_torchrun, needs_torch),
    _param("openmpi", "openmpi", by_openmpi, needs_mpirun("openmpi")),
    _param("mpich", "mpich", by_mpich, needs_mpirun("mpich")),
    _param("slurm", "slurm", by_slurm),
    _param("by-hand", "environment", by_hand),
    _param("by-hand-with-token", "environment", by_hand_with_token),
]
