"""The launcher's look at its own job: whatever fails there, the job does not, and the rest is still shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.run.support import Runner, run
from tests.seeing.support import Op, slate

from phalanx.cli.run import monitor
from phalanx.cli.run.monitor import JobMonitor
from phalanx.seeing import slates
from phalanx.seeing.slates import jobs_here

__all__ = ["run"]

JOB = """
import numpy as np
import phalanx as px

with px.init() as world:
    world.all_reduce(np.ones(8))
"""


class Broken:
    """A view that fails whenever it can."""

    def update(self, watch: Any, picture: Any) -> None:
        raise ValueError("update")

    def close(self, how: str) -> None:
        raise OSError("close")


class Counting:
    """A view that counts."""

    updates = 0
    closed = False

    def update(self, watch: Any, picture: Any) -> None:
        self.updates += 1

    def close(self, how: str) -> None:
        self.closed = True


def test_a_view_that_fails_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {rank: slate(rank, [Op(1, 0, 1)]) for rank in (0, 1)}
    monkeypatch.setattr(slates, "read_files", lambda job: found)
    monkeypatch.setattr(monitor, "OFTEN", 3600.0)
    view = Counting()
    watching = JobMonitor("job", [Broken(), view])
    assert watching.close(failed=True) == []
    assert (view.updates, view.closed) == (1, True)


def test_a_look_that_fails_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def read(job: str) -> Any:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise IndexError(job)
        return {rank: slate(rank, [Op(1, 0, 1)]) for rank in (0, 1)}

    monkeypatch.setattr(slates, "read_files", read)
    monkeypatch.setattr(monitor, "OFTEN", 3600.0)
    view = Counting()
    watching = JobMonitor("job", [view])
    watching._try_to_look()
    assert view.updates == 0
    watching.close(failed=True)
    assert view.updates == 1


def test_a_full_disk_does_not_fail_the_job(run: Runner) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    script = run.script(JOB, "full.py")
    launched = run("-n", "2", "--trace", "/dev/full", script)
    assert launched.process.returncode == 0, launched.err
    assert launched.err == "phalanx: the trace in /dev/full is incomplete: No space left on device\n"
    assert [job for job in jobs_here() if job.program.endswith(script)] == []


def test_a_job_of_one_rank_has_nothing_to_show(run: Runner, tmp_path: Path) -> None:
    launched = run("-n", "1", "--page", "--metrics", str(tmp_path / "m.prom"), run.script(JOB))
    assert launched.process.returncode == 0
    assert launched.err == "phalanx: --page, --metrics: a job of one rank has nothing to show (it waits for nobody)\n"


def test_one_file_cannot_be_trace_and_metrics(run: Runner, tmp_path: Path) -> None:
    launched = run("-n", "2", "--trace", "same", "--metrics", str(tmp_path / "same"), run.script(JOB))
    assert launched.process.returncode == 2
    assert "--trace and --metrics both name" in launched.err
    assert not (tmp_path / "same").exists()


def test_two_worlds_after_each_other_are_both_seen(run: Runner, tmp_path: Path) -> None:
    script = run.script(
        """
        import numpy as np
        import phalanx as px

        for _ in range(2):
            with px.init() as world:
                for _ in range(20):
                    world.all_reduce(np.ones(8))
        """
    )
    metrics, trace = tmp_path / "m.prom", tmp_path / "t.json"
    launched = run("-n", "2", "--metrics", str(metrics), "--trace", str(trace), script)
    assert launched.process.returncode == 0, launched.err
    [line] = [line for line in metrics.read_text().splitlines() if line.startswith("phalanx_operations_total{")]
    assert line.endswith(" 40")
    events = [event for event in json.loads(trace.read_text()) if event.get("cat") == "collective"]
    assert len(events) == 80
