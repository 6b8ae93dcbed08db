"""Ranks with different numbers of batches, copies, several wrappers."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from tests.parallel.cases.table import (
    Trial,
    case,
    grads,
    mlp,
    right,
    seeded,
    state,
    step,
)
from torch import nn


def joining(t: Trial, module: Any, pause: bool = False, **options: Any) -> Any:
    model = t.wrap(module, **options)
    with model.join():
        for index in range(2 * (t.size - t.rank)):
            with model.no_sync() if pause and index % 2 == 0 else contextlib.nullcontext():
                model(t.x(index)).square().sum().backward()
            if not (pause and index % 2 == 0):
                step(model)
                model.zero_grad()
    return state(model)


case("join")(lambda t: joining(t, mlp(), bucket_bytes=64))
case("join, no_sync")(lambda t: joining(t, mlp(), pause=True))
case("join, unused")(lambda t: joining(t, mlp(), find_unused_parameters=True))
case("join, buffers")(lambda t: joining(t, seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))))


@case()
def names_of_the_state(t: Trial) -> Any:
    model = t.wrap(mlp())
    other = t.wrap(nn.Sequential(*(type(part)(*_sizes(part)) for part in mlp())))
    other.load_state_dict(model.state_dict())
    return [*model.state_dict(), *(name for name, _ in model.named_parameters())], state(other)


def _sizes(part: Any) -> tuple[int, ...]:
    return (part.in_features, part.out_features) if isinstance(part, nn.Linear) else ()


@right()
def a_copy_trains_for_itself(t: Trial) -> Any:
    model = t.wrap(mlp())
    model(t.x()).sum().backward()
    other = copy.deepcopy(model)
    other.zero_grad()
    other(t.x(1)).sum().backward()
    return grads(model), grads(other)


@case()
def autocast(t: Trial) -> Any:
    model = t.wrap(mlp())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(t.x()).float().square().sum()
    loss.backward()
    return grads(model)


@right()
def wrapper_that_is_gone(t: Trial) -> Any:
    """The output keeps what it needs."""
    module = mlp()
    t.wrap(module)(t.x()).sum().backward()
    return grads(module)


@right()
def two_wrappers_around_one_module(t: Trial) -> Any:
    module = mlp()
    first, second = t.wrap(module), t.wrap(module)
    first(t.x()).sum().backward()
    second(t.x(1)).sum().backward()
    return grads(module)


@right()
def two_wrappers_in_one_graph(t: Trial) -> Any:
    a, b = (t.wrap(seeded(lambda: nn.Linear(4, 4)), bucket_bytes=16) for _ in range(2))
    b(torch.tanh(a(t.x()))).sum().backward()
    return grads(a), grads(b)
