"""A rank that fails on MPI: what the others see, and how soon."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from tests.lateness import bound
from tests.launchers.processes import Job
from tests.mpi.starting import Starter, on_each_mpi

SOON = 5.0
"""Seconds, on a machine that has other work as well. On a quiet one it takes some milliseconds."""
LIVE_ON = {"openmpi": (), "mpich": ("-disable-auto-cleanup",)}
"""What keeps a launcher from ending the others at once; without it, MPICH's is quicker than anybody could tell."""
UNSEEN = {"openmpi": (), "mpich": ("sh", "-c", '"$@"; code=$?; [ $code -lt 128 ] && exit $code; exit 0', "sh")}
"""What hides from a launcher that a signal ended a rank: MPICH's sends SIGUSR1 to the others, or even SIGKILL, whatever
it was told. Open MPI's would take a rank that ends without a word for a failed one."""


def fail(mpirun: Starter, how: str, *options: str, ranks: int = 3, through: tuple[str, ...] = ()) -> Job:
    return mpirun.start(ranks, "-m", "tests.mpi.failing", how, mpirun.folder, options=options, through=through)


def seen(mpirun: Starter, ranks: int = 3) -> list[dict[str, Any]]:
    """What each of the others saw, as far as the launcher let them."""
    files = [mpirun.folder / f"rank{rank}.json" for rank in range(ranks - 1)]
    return [json.loads(file.read_text()) for file in files if file.exists()]


@pytest.mark.parametrize("mpirun", on_each_mpi, indirect=True)
def test_a_rank_that_raises_ends_all_with_its_traceback(mpirun: Starter) -> None:
    job = fail(mpirun, "raises")
    assert job.finish() != 0
    assert 'raise ValueError("these data are no good")' in job.err
    found = seen(mpirun)
    assert found, job.err
    for one in found:
        assert one["error"] == "PeerLost"
        assert "rank 2 is lost: it raised ValueError: these data are no good" in one["text"]
        assert 'raise ValueError("these data are no good")' in one["text"], "its traceback"
        assert one["after"] < bound(SOON)


@pytest.mark.parametrize(
    "how",
    [
        "is killed",
        "is killed with a message for it",
        "is killed with a message from it",
        "is killed with a receive from it",
        "is killed with a receive from it that no thread waits for",
    ],
)
@pytest.mark.parametrize("mpirun", on_each_mpi, indirect=True)
def test_a_rank_that_is_killed_is_missed_by_all(mpirun: Starter, how: str) -> None:
    job = fail(mpirun, how, *LIVE_ON[mpirun.name], through=UNSEEN[mpirun.name])
    assert job.finish() != 0
    found = seen(mpirun)
    assert found or mpirun.name == "openmpi", job.err  # its mpirun may have been quicker
    for one in found:
        assert one["error"] == "PeerLost"
        assert one["text"].startswith("rank 2 is lost")
        assert one["after"] < bound(SOON)


@pytest.mark.parametrize("mpirun", on_each_mpi, indirect=True)
def test_a_forked_child_has_no_part_in_it(mpirun: Starter) -> None:
    job = fail(mpirun, "forks", ranks=2)
    assert job.finish() == 0, job.err


@pytest.mark.parametrize("mpirun", on_each_mpi, indirect=True)
def test_a_world_closes_before_mpi_also_if_it_is_not_the_first(mpirun: Starter) -> None:
    job = fail(mpirun, "had another world", ranks=2)
    assert job.finish() == 0, job.err


@pytest.mark.parametrize("mpirun", on_each_mpi, indirect=True)
def test_a_rank_that_comes_late_is_named(mpirun: Starter) -> None:
    job = fail(mpirun, "comes late")
    assert job.finish() != 0
    found = seen(mpirun)
    assert found, job.err
    for one in found:
        assert one["error"] == "Timeout"
        assert "arrived: 0, 1; missing: 2" in one["text"]
        assert "rank 2 is in no operation; it finished all_reduce(op=sum) #1 of float32[4]" in one["text"]


@pytest.mark.parametrize("mpirun", on_each_mpi, indirect=True)
def test_another_operation_is_found_before_mpi_is_entered(mpirun: Starter) -> None:
    job = fail(mpirun, "calls another operation")
    assert job.finish() != 0
    assert "Desync" in job.err
    found = seen(mpirun)
    assert found or mpirun.name == "openmpi", job.err  # its mpirun may have been quicker
    assert {one["error"] for one in found} <= {"Desync", "PeerLost"}  # the latter: who came last saw the others leave
    texts = [job.err, *(one["text"] for one in found)]
    assert any("of float32[4]" in text and "of float32[5]" in text for text in texts)


@pytest.mark.parametrize("launcher", ["phalanx run", "torchrun-style variables"])
@pytest.mark.parametrize("mpirun", on_each_mpi, indirect=True)
def test_another_launcher_does_not_make_worlds_of_one(mpirun: Starter, launcher: str) -> None:
    script = mpirun.folder / "hello.py"
    script.write_text("import phalanx\nprint(phalanx.init(timeout=20).world_size)\n")
    if launcher == "phalanx run":
        command, env = ("-m", "phalanx", "run", "-n", "2", str(script)), {}
    else:
        command, env = (str(script),), {"RANK": "0", "WORLD_SIZE": "2"}
    job = mpirun.start_alone(sys.executable, *command, PHALANX_BACKEND="mpi", **env)
    assert job.finish() == 1
    assert job.out == ""
    words = f"ConfigError: {launcher} started a world of 2 (WORLD_SIZE=2), but {mpirun.vendor}"
    assert words in job.err, job.err
    assert "mpirun -n 2" in job.err
