"""Fixtures of the recipes' tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.launchers.processes import Jobs
from tests.recipes.clients import Client


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    """Starts commands; fails if one of them leaves a process or a file."""
    started = Jobs(tmp_path)
    yield started
    started.clean_up()


@pytest.fixture
def client(jobs: Jobs) -> Client:
    """Runs programs to their ends."""
    return Client(jobs)
