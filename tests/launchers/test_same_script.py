"""The same script under every launcher, and two jobs at once that must not mix."""

from __future__ import annotations

import sys

import pytest
from tests.launchers.processes import HELLO, Job, Jobs, finish_all
from tests.launchers.starting import LAUNCHERS, RANKS, Launcher, by_two_torchruns, needs_torch


def check(started: list[Job], launcher: str, job: str) -> None:
    """Every rank of the job has said what it should, once."""
    lines = sorted((line for process in started for line in process.lines), key=lambda line: line["rank"])
    assert lines == [
        {
            "rank": rank,
            "world_size": RANKS,
            "local_rank": rank,
            "local_world_size": RANKS,
            "launcher": launcher,
            "sum": [RANKS * (RANKS + 1) // 2] * 3,
            "last": [10 * (RANKS - 1)],
            "jobs": [job],
        }
        for rank in range(RANKS)
    ]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_jobs_at_once(launcher: Launcher, jobs: Jobs) -> None:
    started = {name: launcher.start(jobs, [str(HELLO), name]) for name in ("left", "right")}
    finish_all([process for processes in started.values() for process in processes])
    for name, processes in started.items():
        check(processes, launcher.name, name)
        assert not [line for process in processes for line in process.err.splitlines() if "phalanx" in line.lower()]


@needs_torch
@pytest.mark.parametrize("backend", ["c10d"])
def test_two_agents_that_find_each_other_by_c10d(backend: str, jobs: Jobs) -> None:
    started = by_two_torchruns(jobs, [str(HELLO)], backend=backend)
    finish_all(started)
    # Which agent is node 0 is decided by torchrun, but local ranks are Phalanx's own: all four share this host.
    check(started, "torchrun", "job")


@needs_torch
def test_two_agents_on_one_host_need_no_token(jobs: Jobs) -> None:
    started = by_two_torchruns(jobs, [str(HELLO)], token=None)
    finish_all(started)
    check(started, "torchrun", "job")


def test_plain_python(jobs: Jobs) -> None:
    job = jobs.start(sys.executable, HELLO)
    finish_all([job])
    (line,) = job.lines
    assert line == {
        "rank": 0,
        "world_size": 1,
        "local_rank": 0,
        "local_world_size": 1,
        "launcher": "none",
        "sum": [1, 1, 1],
        "last": [0],
        "jobs": ["job"],
    }
    assert job.err == ""
