"""Fixtures of the tests on two hosts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.hosts.network import Network, why_not
from tests.launchers.processes import Jobs


@pytest.fixture(scope="session")
def _hosts() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def network(_hosts: None) -> Iterator[Network]:
    """Two hosts that nobody else uses."""
    with Network() as made:
        yield made


@pytest.fixture
def jobs(network: Network, tmp_path: Path) -> Iterator[Jobs]:
    """Starts commands; fails if one of them leaves a process or a file. Ends before the network does."""
    started = Jobs(tmp_path)
    yield started
    started.clean_up()
