"""Backwards inside a backward, as re-entrant checkpointing has them, and the other kind."""

from __future__ import annotations

import functools
from typing import Any

import torch
from tests.parallel.cases.table import (
    Blocks,
    Made,
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
from torch.utils.checkpoint import checkpoint


def checkpointed(t: Trial, which: set[int], reentrant: bool, **options: Any) -> Any:
    def around(index: int, block: Any, x: Any) -> Any:
        return checkpoint(block, x, use_reentrant=reentrant) if index in which else block(x)

    model = t.wrap(Blocks(around), **options)
    for index in range(3):
        model.zero_grad()
        model(t.x(index).requires_grad_()).square().sum().backward()
        step(model)
    return state(model), grads(model)


for reentrant in (True, False):
    for words, which in {"first": {0}, "middle": {1}, "last": {2}, "every": {0, 1, 2}}.items():
        name = f"{words} block checkpointed, reentrant={reentrant}"
        case(name)(functools.partial(checkpointed, which=which, reentrant=reentrant))
        case(f"{name}, many buckets")(
            functools.partial(checkpointed, which=which, reentrant=reentrant, bucket_bytes=16)
        )


def nested(t: Trial, reentrant: bool) -> Any:
    again = functools.partial(checkpoint, use_reentrant=reentrant)
    model = t.wrap(Blocks(lambda index, block, x: again(lambda y: again(block, y), x)), bucket_bytes=16)
    model(t.x().requires_grad_()).square().sum().backward()
    return grads(model)


case("checkpoint in a checkpoint, reentrant=True")(functools.partial(nested, reentrant=True))
case("checkpoint in a checkpoint, reentrant=False")(functools.partial(nested, reentrant=False))


def shared_by_checkpoints(t: Trial, reentrant: bool) -> Any:
    """One block, used three times: as it is, and in two backwards inside the backward."""
    block = seeded(lambda: nn.Linear(4, 4))

    def call(self: Any, x: Any) -> Any:
        x = checkpoint(self.block, torch.tanh(self.first(x)), use_reentrant=reentrant)
        return self.block(checkpoint(self.block, torch.tanh(x), use_reentrant=reentrant))

    model = t.wrap(Made(call, first=seeded(lambda: nn.Linear(4, 4)), block=block), bucket_bytes=16)
    found = []
    for index in range(3):
        model.zero_grad()
        model(t.x(index)).square().sum().backward()
        found += grads(model)
    return found


right("a block in several checkpoints, reentrant=True")(functools.partial(shared_by_checkpoints, reentrant=True))
right("a block in several checkpoints, reentrant=False")(functools.partial(shared_by_checkpoints, reentrant=False))


@right()
def checkpointed_and_unused(t: Trial) -> Any:
    def call(self: Any, x: Any) -> Any:
        return checkpoint(self.b, torch.tanh(self.a(x)), use_reentrant=True)

    parts = {name: seeded(lambda: nn.Linear(4, 4)) for name in ("a", "b", "unused")}
    model = t.wrap(Made(call, **parts), find_unused_parameters=True)
    model(t.x()).square().sum().backward()
    return grads(model)


@right()
def wrapper_inside_a_checkpoint(t: Trial) -> Any:
    model = t.wrap(mlp())
    checkpoint(model, t.x().requires_grad_(), use_reentrant=True).square().sum().backward()
    return grads(model)


@right()
def wrapper_twice_in_a_checkpoint(t: Trial) -> Any:
    model = t.wrap(seeded(lambda: nn.Linear(4, 4)))
    model(torch.tanh(checkpoint(model, t.x().requires_grad_(), use_reentrant=True))).square().sum().backward()
    return grads(model)
