"""`px.parallel.DDP` over the table of `cases`: as torch's wrapper on Gloo, or as the mean over the ranks."""

from __future__ import annotations

import functools
import importlib.util
import tempfile
from pathlib import Path

import pytest

from phalanx.testing import run_ranks

pytest.importorskip("torch")

from tests.parallel.cases import CASES, run  # noqa: E402


@functools.cache
def _outcomes(ranks: int) -> dict[str, str]:
    """Of all cases: one world runs them one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(ranks, run, str(Path(folder) / "store"), backend="mesh", timeout=110)[0]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, ranks: int) -> None:
    assert _outcomes(ranks)[name] == ""
