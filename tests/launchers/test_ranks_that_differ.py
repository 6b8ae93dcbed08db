"""Ranks of one job that do not have the same: without the core, on one processor, with other ways between them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.launchers.processes import Jobs
from tests.launchers.starting import by_hand

SCRIPT = str(Path(__file__).with_name("ranks_that_differ.py"))
PURE = {"PHALANX_PURE": "1"}
ONE_CORE = {"ONE_CORE": "1"}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("other", [PURE, ONE_CORE], ids=["pure", "one-core"])
def test_one_rank_differs(jobs: Jobs, other: dict[str, str], ranks: int, transport: str) -> None:
    started = by_hand(jobs, [SCRIPT], ranks=ranks, special={1: other}, PHALANX_TRANSPORT=transport)
    codes = [job.finish() for job in started]
    assert codes == [0] * ranks, "\n".join(job.err for job in started)
    core, processors = started[-2].out.split()  # the last one that was started has rank 0
    assert core == "False" if other is PURE else processors == "1"
