"""A script written for torchrun, with torch.distributed and Gloo, runs unchanged under `phalanx run`."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.launchers.processes import Jobs, finish_all
from tests.launchers.starting import needs_torch

SCRIPT = Path(__file__).with_name("torch_script.py")


@needs_torch
def test_torch_distributed_with_gloo(jobs: Jobs) -> None:
    job = jobs.start(sys.executable, "-m", "phalanx", "run", "-n", "3", SCRIPT)
    finish_all([job])
    lines = sorted(job.lines, key=lambda line: line["rank"])
    assert lines == [{"rank": rank, "local_rank": rank, "sum": [3.0] * 4, "heard": (rank - 1) % 3} for rank in range(3)]
    assert job.err == ""
