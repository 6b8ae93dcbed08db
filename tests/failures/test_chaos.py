"""A few worlds of the chaos soak, so that it is known to work. `make chaos` runs hundreds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def chaos(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.soak.chaos", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONUTF8": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_a_few_worlds() -> None:
    done = chaos("--worlds", "3", "--stop-worlds", "1", "--seed", "7")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "A rank was killed: 3 worlds" in done.stdout
    assert "A rank was stopped: 1 worlds" in done.stdout
    assert done.stdout.count("0 worlds failed") == 2
    assert "median" in done.stdout


def test_the_same_seed_gives_the_same_worlds() -> None:
    code = "from tests.soak.chaos import Plan; print([str(Plan.draw('kill', n)) for n in range(20)])"
    first, second = (
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    )
    assert first == second
    assert "hosted by rank 0" in first
    assert "hosted by the parent" in first
