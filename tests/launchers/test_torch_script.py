"""A script written for torchrun, with torch.distributed and Gloo, runs unchanged under `phalanx run`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from tests.launchers.processes import Jobs, finish_all
from tests.launchers.starting import needs_torch, torchrun

SCRIPT = Path(__file__).with_name("torch_script.py")


@needs_torch
def test_torch_distributed_with_gloo(jobs: Jobs) -> None:
    job = jobs.start(sys.executable, "-m", "phalanx", "run", "-n", "3", SCRIPT)
    finish_all([job])
    lines = sorted(job.lines, key=lambda line: line["rank"])
    assert lines == [{"rank": rank, "local_rank": rank, "sum": [3.0] * 4, "heard": (rank - 1) % 3} for rank in range(3)]
    assert job.err == ""


FAILS = {
    "torch": """
import torch
import torch.distributed as dist
dist.init_process_group("phalanx")
for step in range(20):
    if step == 10 and dist.get_rank() == 2:
        raise RuntimeError("the loss is not a number")
    dist.all_reduce(torch.ones(4))
""",
    "phalanx": """
import numpy as np
import phalanx as px
world = px.init()
for step in range(20):
    if step == 10 and world.rank == 2:
        raise RuntimeError("the loss is not a number")
    world.all_reduce(np.ones(4))
""",
}


@needs_torch
@pytest.mark.parametrize("library", FAILS)
def test_torchrun_names_the_rank_that_raised(jobs: Jobs, tmp_path: Path, library: str) -> None:
    script = tmp_path / "fails.py"
    script.write_text(FAILS[library])
    job = torchrun(jobs, [str(script)], "--standalone", "--nproc-per-node", "3")
    assert job.finish() == 1
    root = re.search(r"Root Cause.*?rank +: (\d)", job.err, re.DOTALL)
    assert root is not None, job.err
    assert root[1] == "2", job.err
