"""A short run of `make elastic`: a job whose ranks are killed at several points ends as if none had been."""

from __future__ import annotations

import pytest
from tests.soak.elastic import run_job


@pytest.mark.timeout(180)
def test_a_job_with_a_few_kills() -> None:
    outcome = run_job(4, 4, seed=11, spacing=40)
    assert outcome.kills.total() >= 3
    assert outcome.epochs >= 3
