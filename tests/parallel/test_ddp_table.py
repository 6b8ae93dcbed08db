"""`px.parallel.DDP` over the table of `cases`: as torch's wrapper on Gloo, or as the mean over the ranks."""

from __future__ import annotations

import fcntl
import json
import tempfile
from pathlib import Path

import pytest

from phalanx.testing import run_ranks

pytest.importorskip("torch")

from tests.parallel.cases import CASES, run


def _run(ranks: int) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, str] = run_ranks(ranks, run, str(Path(folder) / "store"), backend="mesh", timeout=110)[0]
    return found


@pytest.fixture(scope="module", params=[2, 3])
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What is wrong with each case. One world runs all of them, for all workers of pytest."""
    ranks: int = request.param
    if not hasattr(request.config, "workerinput"):
        return _run(ranks)
    path = tmp_path_factory.getbasetemp().parent / f"ddp-{ranks}.json"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_text(json.dumps(_run(ranks)))
    found: dict[str, str] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, outcomes: dict[str, str]) -> None:
    assert outcomes[name] == ""
