"""A rank that does the same with a group whose operations are noted, and with one whose are not."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import phalanx as px

__all__ = ["Costs", "run_rank"]


class Costs(NamedTuple):
    """What a rank has measured: the seconds of one call, for each turn."""

    noted: list[float]
    plain: list[float]


def run_rank(what: str, turns: int, seconds: float) -> Costs:
    """Takes turns, each of about so many seconds.

    Args:
        what: `all_reduce`, or the name of a model that is trained.
    """
    world = px.init()
    noted = world.subgroup(range(world.world_size))
    control = world.backend.control
    slate, control.slate = control.slate, None
    assert slate is not None, "this rank has no slate: there is nothing to measure"
    plain = world.subgroup(range(world.world_size))
    control.slate = slate
    calls = [_call(what, group) for group in (noted, plain)]
    count = _calls_in(world, calls, seconds)
    found: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns):
        for which in (0, 1) if turn % 2 else (1, 0):
            world.barrier()
            began = time.perf_counter()
            for _ in range(count):
                calls[which]()
            found[which].append((time.perf_counter() - began) / count)
    world.close()
    return Costs(*found)


def _call(what: str, group: px.Group) -> Callable[[], Any]:
    if what == "all_reduce":
        x = np.zeros(1)
        return lambda: group.all_reduce(x)
    import torch

    from ..training.models import MODELS

    torch.set_num_threads(1)
    torch.manual_seed(0)
    setup = MODELS[what](group.rank)
    model = px.parallel.DDP(setup.model, group)
    optimizer = setup.optimizer(model.parameters())
    x, y = setup.batch

    def step() -> None:
        optimizer.zero_grad()
        setup.loss(model(x), y).backward()
        optimizer.step()

    return step


def _calls_in(world: px.Group, calls: list[Callable[[], Any]], seconds: float) -> int:
    """So many calls last about so long; the same number on all ranks."""
    for call in calls:
        for _ in range(5):
            call()
    world.barrier()
    began = time.perf_counter()
    for _ in range(20):
        calls[0]()
    count = np.array([20 * seconds / (time.perf_counter() - began)])
    world.all_reduce(count, op="min")
    return max(1, int(count[0]))
