"""Small runs of `python -m benchmarks checkpoint`, `memory`, `pipeline`, `torch-calls`, `elastic` have all rows."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.launchers.starting import needs_torch

pytestmark = [needs_torch, pytest.mark.timeout(180)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["checkpoint", "-n", "2", "--mib", "1", "--rounds", "1"], ["1,000 small tensors", "one large tensor"]),
        (
            ["memory", "-n", "2", "--size", "tiny", "--steps", "1", "--rounds", "1", "--only", "Phalanx's"],
            ["FSDP", "DDP"],
        ),
        (["pipeline", "-n", "2", "--ms", "1", "--steps", "1"], ["gpipe", "1f1b", "interleaved"]),
        (
            ["torch-calls", "-s", "4", "--rounds", "4", "--calls", "5"],
            ["all_reduce", "reduce_scatter_tensor", "send and recv", "batch_isend_irecv"],
        ),
        (["elastic", "-n", "2", "--ms", "1", "--ms", "2", "--seconds", "0.01"], ["1 ms", "2 ms"]),
    ],
    ids=lambda value: value[0],
)
def test_small_runs(arguments: list[str], words: list[str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=160,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    rows = [line for line in ended.stdout.splitlines() if any(word in line for word in words)]
    assert len(rows) == len(words), ended.stdout


def test_nothing_to_measure() -> None:
    command = [sys.executable, "-m", "benchmarks", "memory", "--only", "Horovod"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 2
    assert "--only 'Horovod' leaves nothing (there are Phalanx's FSDP" in ended.stderr
