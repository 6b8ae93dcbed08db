"""Outputs of all kinds, and losses that are none."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from tests.parallel.cases.table import (
    Made,
    Trial,
    case,
    grads,
    mlp,
    right,
    seeded,
)
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclasses.dataclass
class Output:
    value: Any
    note: str = ""


class Odd:
    """An output of a class that nobody knows, and that leads back to itself."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.me = self


for kind in (Output, Odd):

    @right(f"an output of class {kind.__name__}, reentrant")
    def _of_class(t: Trial, kind: Any = kind) -> Any:
        def call(self: Any, x: Any) -> Any:
            return kind(checkpoint(self.b, torch.tanh(self.a(x)), use_reentrant=True))

        model = t.wrap(Made(call, a=seeded(lambda: nn.Linear(4, 4)), b=seeded(lambda: nn.Linear(4, 4))))
        model(t.x()).value.square().sum().backward()
        return grads(model)


@right()
def a_loss_that_is_an_attribute(t: Trial) -> Any:
    def call(self: Any, x: Any) -> Any:
        out = self.a(x)
        self.extra = self.b(x).square().sum()
        return out

    module = Made(call, a=seeded(lambda: nn.Linear(4, 4)), b=seeded(lambda: nn.Linear(4, 4)))
    model = t.wrap(module, bucket_bytes=16)
    (model(t.x()).square().sum() + module.extra).backward()
    return grads(model)


@right()
def only_an_attribute(t: Trial) -> Any:
    def call(self: Any, x: Any) -> None:
        self.loss = self.a(x).square().sum()

    module = Made(call, a=seeded(lambda: nn.Linear(4, 4)))
    model = t.wrap(module)
    model(t.x())
    module.loss.backward()
    return grads(model)


@case()
def output_changed_in_place(t: Trial) -> Any:
    model = t.wrap(mlp())
    out = model(t.x())
    out.mul_(2)
    out.square().sum().backward()
    return grads(model)
