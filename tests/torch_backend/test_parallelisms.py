"""What torch builds on a process group gives the same losses as on Gloo, bit for bit between two ranks."""

from __future__ import annotations

import pytest
from tests.torch_backend.parallelisms import run
from tests.torch_backend.parallelisms.compare import differences
from tests.torch_backend.support import TORCH

pytestmark = pytest.mark.skipif(TORCH < (2, 13), reason="the Gloo of older releases lacks some of it, or sums wrongly")


@pytest.mark.timeout(400)
def test_the_same_as_on_gloo() -> None:
    ours, theirs = (run(backend, 2, without="inductor") for backend in ("phalanx", "gloo"))
    assert len(ours) > 50
    assert not differences(ours, theirs, exact=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_same_as_on_gloo_with_four_ranks_and_inductor() -> None:
    ours, theirs = (run(backend, 4) for backend in ("phalanx", "gloo"))
    assert not differences(ours, theirs, exact=False)
