"""`phalanx doctor --last` after a crash and after a hang."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.run.support import PROGRAM, Runner

from phalanx.cli.doctor import last
from phalanx.errors import PhalanxError


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Runner]:
    runner = Runner(tmp_path)
    yield runner
    runner.clean_up()


def test_a_rank_that_was_killed(run: Runner) -> None:
    script = run.script(
        """
        import os, signal
        import numpy as np
        import phalanx as px

        world = px.init()
        for _ in range(20):
            world.all_reduce(np.ones(4))
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        world.all_reduce(np.ones(4))
        """,
        "killed.py",
    )
    launched = run("-n", "3", script)
    assert launched.process.returncode != 0
    told = last.tell_last()
    assert "killed.py: 3 of 3 ranks were on this machine" in told
    assert "rank 1 is gone; it was last seen" in told
    assert "all_reduce #20 at killed.py:8" in told
    assert "the last 5 seconds:" in told


def test_a_job_that_fails_behind_its_world(run: Runner) -> None:
    script = run.script(
        """
        import numpy as np
        import phalanx as px

        with px.init() as world:
            world.all_reduce(np.ones(4))
            rank = world.rank
        if rank == 1:
            raise ValueError("no such thing")
        """,
        "behind.py",
    )
    assert run("-n", "2", script).process.returncode == 1
    assert "\n  rank 1 failed: ValueError: no such thing\n" in last.tell_last()


def test_nothing_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last, "jobs_here", list)
    with pytest.raises(PhalanxError, match="no job of this user has left anything"):
        last.tell_last()


def test_a_folder_without_last() -> None:
    answer = subprocess.run(
        [*PROGRAM, "doctor", "--flight-recorder", "x"],
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ),
    )
    assert answer.returncode == 2
    assert "--flight-recorder goes with --last" in answer.stderr
