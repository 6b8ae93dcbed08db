"""The GPT of the examples on shards, beside one process. `make strategies` is the whole table."""

from __future__ import annotations

import pytest
from tests.parallel.strategies import LIMIT, STRATEGIES, alone, losses_of

from phalanx.testing import run_ranks

STEPS = 4


def test_losses_of_one_process_and_of_each_strategy() -> None:
    names = [name for name in STRATEGIES if not name.startswith("Pipeline")]  # those have tests of their own
    whole, parts = alone(1, STEPS), alone(4, STEPS)
    for found in run_ranks(4, losses_of, names, STEPS, backend="mesh", timeout=100):
        assert list(found) == names
        for name, losses in found.items():
            assert losses == pytest.approx(whole, abs=LIMIT), name
        # Gradients are added up in the order of ranks, as one process adds up those of its parts.
        assert found["DDP"] == found["FSDP, full"] == found["FSDP, grads"] == parts
