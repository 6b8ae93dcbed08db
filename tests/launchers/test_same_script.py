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
def test_two_jobs_of_two_torchruns_each(jobs: Jobs) -> None:
    """One job has a token and finds itself statically, the other has none (one host needs none) and goes by c10d."""
    static = by_two_torchruns(jobs, [str(HELLO), "static"], backend="static", token="of this job")
    c10d = by_two_torchruns(jobs, [str(HELLO), "c10d"], backend="c10d", token=None)
    finish_all([*static, *c10d])
    # Which agent is the first node is torchrun's choice, but local ranks are Phalanx's own: all four share this host.
    check(static, "torchrun", "static")
    check(c10d, "torchrun", "c10d")


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
