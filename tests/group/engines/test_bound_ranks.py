"""Ranks that are bound to cores, each to its own as by Slurm and mpirun, or some of them only."""

from __future__ import annotations

import os

import pytest
from tests.group.engines.test_copy_once import copy_once_from, move

import phalanx as px
from phalanx import _native

pytestmark = [
    pytest.mark.skipif(not _native.available, reason="the segment needs the core (PHALANX_PURE is set)"),
    pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no process"),
    pytest.mark.skipif(px.Options().transport == "tcp", reason="it needs shared memory"),
]

CORES = sorted(os.sched_getaffinity(0))[:2]
SIZES = (1, 5_000, 20_001, 50_000, 70_001, 300_001)
NEVER = 1 << 40


def bound(cores: list[list[int]], by_address: bool) -> tuple[bool, bool]:
    """Moves arrays of all sizes; whether this rank believes that its core is wanted by others."""
    rank = int(os.environ["RANK"])
    os.sched_setaffinity(0, cores[rank])
    if not by_address:
        copy_once_from(NEVER)
    with px.init(backend="mesh", timeout=20) as group:
        for count in SIZES:
            move(group, count)
        world, segment = group._backend.world, group._engine.segment  # type: ignore[union-attr, attr-defined]
        return world.oversubscribed, segment.crowded


@pytest.mark.skipif(len(CORES) < 2, reason="two cores are needed")
@pytest.mark.parametrize("by_address", [True, False])
@pytest.mark.parametrize("cores", [[[CORES[0]], [CORES[-1]]], [[CORES[0]], CORES], [CORES, [CORES[-1]]]])
def test_ranks_with_a_core_each_do_not_share_it(cores: list[list[int]], by_address: bool) -> None:
    assert px.launch(bound, 2, cores, by_address, timeout=60) == [(False, False)] * 2


@pytest.mark.parametrize("cores", [[CORES[:1]] * 2, [CORES, CORES[:1], CORES[:1]]])
def test_ranks_on_one_core_know_that_they_share_it(cores: list[list[int]]) -> None:
    assert px.launch(bound, len(cores), cores, True, timeout=60) == [(True, True)] * len(cores)
