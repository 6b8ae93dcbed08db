"""What the tests of rings share. Rings need the native core."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from tests.transports.support import Pair, Quick

from phalanx._native import core


@pytest.fixture
def native() -> None:
    """Skips where there is none."""
    if core is None:
        pytest.skip("rings need the native core")


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A channel that still goes over TCP."""
    with contextlib.closing(Pair()) as made:
        yield made


@pytest.fixture
def quick(pair: Pair) -> Iterator[Quick]:
    """The fast path on a channel that has gone over."""
    made = Quick(pair)
    yield made
    made.way.close()
