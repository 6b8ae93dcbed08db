"""Parameters: shared, unused, frozen, of all dtypes and strides."""

from __future__ import annotations

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
    state,
    step,
    train,
)
from torch import nn


@case()
def a_parameter_used_twice(t: Trial) -> Any:
    return train(t, Made(lambda self, x: self.a(torch.tanh(self.a(x))), a=seeded(lambda: nn.Linear(4, 4))))


@case()
def tied_weights(t: Trial) -> Any:
    a, b = seeded(lambda: (nn.Linear(4, 4), nn.Linear(4, 4)))
    b.weight = a.weight
    return train(t, Made(lambda self, x: self.b(torch.tanh(self.a(x))), a=a, b=b), bucket_bytes=16)


def forked() -> Any:
    parts = {name: seeded(lambda: nn.Linear(4, 4)) for name in "abc"}
    return Made(lambda self, x, which: getattr(self, which)(x), **parts)


@case()
def unused_here_and_there(t: Trial) -> Any:
    model = t.wrap(forked(), find_unused_parameters=True)
    found = []
    for index in range(3):
        model.zero_grad()
        model(t.x(index), "ab"[(t.rank + index) % 2]).square().sum().backward()
        found += grads(model)
        step(model)
    return found, state(model)


@right()
def unused_after_no_sync(t: Trial) -> Any:
    """What was added up counts, although this backward does not come there."""
    model = t.wrap(forked(), find_unused_parameters=True)
    with model.no_sync():
        model(t.x(0), "a").sum().backward()
    model(t.x(1), "b").sum().backward()
    return grads(model)


@right()
def frozen_later(t: Trial) -> Any:
    module = mlp()
    model = t.wrap(module, bucket_bytes=64)
    found = []
    for index in range(3):
        model.zero_grad()
        module[2].weight.requires_grad_(index != 1)
        model(t.x(index)).square().sum().backward()
        found += grads(model)
    return found


@right()
def unfrozen_later(t: Trial) -> Any:
    module = mlp()
    module[0].requires_grad_(False)
    model = t.wrap(module)
    found = []
    for index in range(3):
        model.zero_grad()
        module[0].requires_grad_(index > 0)
        module[2].requires_grad_(index != 1)
        model(t.x(index)).square().sum().backward()
        found += grads(model)
    return found


@right()
def all_frozen_for_a_while(t: Trial) -> Any:
    """As a discriminator while the generator is trained."""
    module = mlp()
    model = t.wrap(module)
    found = []
    for frozen in (True, False, True, False):
        model.zero_grad()
        module.requires_grad_(not frozen)
        model(t.x().requires_grad_()).square().sum().backward()
        found += grads(model)
    return found


@right()
def another_dtype_later(t: Trial) -> Any:
    model = t.wrap(mlp())
    model(t.x()).sum().backward()
    model.double().zero_grad()
    model(t.x().double()).sum().backward()
    return grads(model)


@right()
def a_new_parameter_later(t: Trial) -> Any:
    module = mlp()
    model = t.wrap(module)
    model(t.x()).sum().backward()
    module[4] = seeded(lambda: nn.Linear(8, 3))
    model.zero_grad()
    model(t.x()).sum().backward()
    return grads(model)


@case()
def strides_of_all_kinds(t: Trial) -> Any:
    conv = seeded(lambda: nn.Conv2d(2, 3, 2)).to(memory_format=torch.channels_last)
    turned = seeded(lambda: nn.Parameter(torch.randn(3, 12).t()))
    model = t.wrap(Made(lambda self, x: self.conv(x).flatten(1) @ self.turned, conv=conv, turned=turned))
    found = []
    for index in range(2):
        model.zero_grad()
        model(t.x(index, 2, 2, 3, 3)).square().sum().backward()
        found += grads(model)
    return found, [grad.stride() for grad in found]


@right()
def a_parameter_without_elements(t: Trial) -> Any:
    nothing = nn.Parameter(torch.empty(0, 3))
    model = t.wrap(
        Made(lambda self, x: self.a(x) + self.nothing.sum(), a=seeded(lambda: nn.Linear(4, 1)), nothing=nothing)
    )
    model(t.x()).sum().backward()
    return grads(model)


def _mixed(dtypes: list[torch.dtype]) -> Any:
    parts = {f"l{i}": seeded(lambda: nn.Linear(4, 4)).to(dtype) for i, dtype in enumerate(dtypes)}

    def call(self: Any, x: Any) -> Any:
        for part in (self.l0, self.l1, self.l2):
            x = torch.tanh(part(x.to(part.weight.dtype)))
        return x

    return Made(call, **parts)


for dtypes in (
    [torch.float32, torch.float64, torch.bfloat16],
    [torch.float16, torch.float32, torch.float32],
    [torch.complex64, torch.complex128, torch.complex64],
):
    case(f"{', '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)}")(
        lambda t, dtypes=dtypes: _of_dtypes(t, dtypes)
    )


def _of_dtypes(t: Trial, dtypes: list[torch.dtype]) -> Any:
    model = t.wrap(_mixed(dtypes), bucket_bytes=16)
    model(t.x()).abs().float().square().sum().backward()
    return grads(model)


@case()
def float16_that_would_overflow_as_a_sum(t: Trial) -> Any:
    model = t.wrap(nn.Linear(1, 1, bias=False).to(torch.float16))
    (model(torch.ones(1, 1, dtype=torch.float16)) * 40000).sum().backward()
    return grads(model)
