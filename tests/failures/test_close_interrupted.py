"""Ctrl-C in the middle of closing: a second `close` does what is left, and the others hear of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = ["-m", "tests.failures.close_interrupted"]


@pytest.mark.parametrize(
    ("launcher", "step", "fewest"),
    [([], 2, [50, 50, 50]), (["-m", "phalanx", "run", "-n", "2", "--no-prefix"], 4, [150])],
    ids=["one rank", "two ranks"],
)
def test_a_second_close_does_what_the_first_one_left(launcher: list[str], step: int, fewest: list[int]) -> None:
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    command = [sys.executable, *launcher, *PROGRAM, str(step)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    places = [int(number) for number in done.stdout.split()]
    assert all(found > few for found, few in zip(places, fewest, strict=True)), places
