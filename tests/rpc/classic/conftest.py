"""No test of the classic agents leaves a thread behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.rpc.classic.worlds import agent_threads


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = agent_threads()
    yield
    assert agent_threads() == before
