"""A rank whose loops take turns: plain ones, and elastic ones with states of several kinds."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import phalanx as px

__all__ = ["CONTENDERS", "PLAIN", "run_rank"]

PLAIN = "plain"
TURNS = 10
"""How often each loop has its turn."""


def _array(size: int) -> px.elastic.State:
    return px.elastic.State(x=np.zeros(size, np.uint8), sampler=px.elastic.Sampler(10_000, 64))


def _model() -> px.elastic.State:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(40)])
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.zeros(1, 16)).sum().backward()
    optimizer.step()
    return px.elastic.State(model=model, optimizer=optimizer)


CONTENDERS: dict[str, tuple[Callable[[], Any], bool]] = {
    PLAIN: (lambda: None, False),
    "vote alone": (lambda: _array(64), False),
    "64 KiB copied": (lambda: _array(64 << 10), True),
    "1 MiB copied": (lambda: _array(1 << 20), True),
}
"""The state of each loop, and whether it is copied."""
if importlib.util.find_spec("torch") is not None:
    CONTENDERS["torch, Adam, 80 parameters"] = (_model, True)


def run_rank(length: float, seconds: float) -> dict[str, list[float]]:
    """The seconds of each step, by loop."""
    world = px.init()
    states = {name: make() for name, (make, _) in CONTENDERS.items()}
    found: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    count = max(3, int(seconds / length / TURNS))
    for turn in range(TURNS + 1):
        for name, (_, copies) in CONTENDERS.items():
            if name == PLAIN:
                times = _plain(world, count, length)
            else:
                times = _elastic(world, states[name], copies, count, length)
            if turn:  # the first one warms up
                found[name] += times
    world.close()
    return found


def _work(group: px.Group, part: Any, length: float) -> None:
    end = time.perf_counter() + length
    while time.perf_counter() < end:
        pass
    group.all_reduce(part)


def _plain(world: px.Group, count: int, length: float) -> list[float]:
    part, times = np.zeros(1024, np.float32), []
    last = time.perf_counter()
    for _ in range(count):
        _work(world, part, length)
        now = time.perf_counter()
        times.append(now - last)
        last = now
    return times[1:]


def _elastic(world: px.Group, state: px.elastic.State, copies: bool, count: int, length: float) -> list[float]:
    part, times = np.zeros(1024, np.float32), []
    last = 0.0
    for step in px.elastic.steps(world, state, total=count, copy=copies):
        now = time.perf_counter()
        times.append(now - last)
        last = now
        with step:
            _work(step.group, part, length)
            if not copies:
                step.commit()
    return times[1:]
