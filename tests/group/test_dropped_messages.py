"""A message that its receiver refuses is dropped, and its sender goes on, also if nothing more is asked for."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

import phalanx as px
from phalanx.testing import run_ranks

COUNT = 1 << 20
"""Elements of 4 bytes: more than any ring or socket holds."""


def refuse_a_long_one(group: px.Group, sent: str, late: float) -> None:
    if group.rank == 0:
        group.send(np.ones(COUNT, np.float32), 1, timeout=20)
        Path(sent).touch()
    else:
        time.sleep(late)
        with pytest.raises(px.SizeMismatch):
            group.recv(np.zeros(COUNT - 1, np.float32), 0)
        until = time.monotonic() + 20
        while not Path(sent).exists():  # without a call that would move bytes
            assert time.monotonic() < until, "the sender waits"
            time.sleep(0.01)
    x = np.full(COUNT, group.rank, np.float32)
    y = np.empty_like(x)
    group.sendrecv(x, 1 - group.rank, out=y, src=1 - group.rank)
    assert np.all(y == 1 - group.rank)


@pytest.mark.parametrize("late", [0.0, 0.3])
@pytest.mark.parametrize("backend", ["mesh", "tcp"])
def test_the_sender_goes_on(backend: str, late: float, tmp_path: Path) -> None:
    run_ranks(2, refuse_a_long_one, str(tmp_path / "sent"), late, backend=backend)
