"""Calls of a Group and of an Agent inside functions that `torch.compile` has compiled: they run as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

PROGRAM = """
{before}
import numpy as np
import phalanx as px
from phalanx import rpc

world = px.init()
world.barrier()
{after}
import torch

@torch.compile(backend="eager")
def step(x):
    y = x * 2
    world.all_reduce(y)
    later = world.all_reduce(y, async_op=True)
    later.wait()
    gathered = world.all_gather(y)
    if world.rank == 0:
        world.send(gathered, 1)
    else:
        gathered = world.recv(src=0).data
    return gathered + 1

for _ in range(3):
    assert step(torch.ones(4)).tolist() == [9.0] * 8
agent = rpc.Agent(world)
agent.register("double", lambda x: 2 * x)
world.barrier()

@torch.compile(backend="eager")
def remote(x):
    return agent.call(1 - world.rank, "double", x + 1) + 1

assert remote(torch.ones(3)).tolist() == [5.0] * 3
agent.join()
agent.close()
world.close()
print("well")
"""


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("first", ["torch", "phalanx"])
def test_compiled_functions_call_us(first: str, transport: str, tmp_path: Path) -> None:
    before, after = ("import torch", "") if first == "torch" else ("", "import torch")
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.format(before=before, after=after))
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "run", "-n", "2", script],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "PHALANX_TRANSPORT": transport},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("well") == 2
