"""The bound on time that grows with how late the machine is, and not with how late the code is."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
from tests import lateness
from tests.lateness import Figures, bound

import phalanx as px
from phalanx.testing import run_ranks


def test_a_quiet_machine_allows_nothing_more() -> None:
    since = Figures(late=3.0, wall=2.0, cpu=1.0)
    assert since.bound(1.0, since) == 1.0
    assert Figures(late=3.0, wall=4.0, cpu=3.0).bound(1.0, since) == 1.0


def test_lateness_is_added_and_a_slow_down_multiplies() -> None:
    since = Figures(late=3.0, wall=2.0, cpu=1.0)
    assert Figures(late=3.5, wall=2.0, cpu=1.0).bound(1.0, since) == 1.5
    assert Figures(late=3.0, wall=5.0, cpu=2.0).bound(2.0, since) == 6.0


def test_without_a_probe_a_bound_is_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(lateness.VARIABLE)
    lateness.begin()
    assert bound(1.5) == 1.5


def test_a_probe_that_does_not_run_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(lateness.VARIABLE, "")
    probe = lateness.Probe()
    try:
        os.kill(probe._process.pid, signal.SIGSTOP)
        lateness.begin()
        time.sleep(0.3)
        assert bound(1.0) >= 1.25
    finally:
        probe.close()


def test_ranks_in_processes_have_it_too() -> None:
    def both(_group: px.Group) -> float:
        return bound(1.0)

    assert all(np.isfinite(one) and one >= 1.0 for one in run_ranks(2, both, backend="mesh"))
