"""What programs do to gradients."""

from __future__ import annotations

import functools
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


@case()
def gradients_replaced(t: Trial) -> Any:
    model = t.wrap(mlp())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(t.rank))
    model(t.x()).sum().backward()
    return grads(model)


@case()
def gradients_dropped_after_forward(t: Trial) -> Any:
    model = t.wrap(mlp(), bucket_bytes=64)
    model(t.x()).sum().backward()
    loss = model(t.x(1)).sum()
    model.zero_grad(set_to_none=True)
    loss.backward()
    return grads(model)


@case()
def gradients_kept_by_the_program(t: Trial) -> Any:
    """Those of one step are not changed by the next."""
    model = t.wrap(mlp())
    model(t.x()).sum().backward()
    kept = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    model(t.x(1)).sum().backward()
    return kept, grads(model)


def _scale(factor: float, parameter: Any) -> None:
    parameter.grad.mul_(factor)


@case()
def hooks_of_the_program(t: Trial) -> Any:
    """They see this rank's gradients, and what they make of them is averaged."""
    module = mlp()
    seen = []
    module[0].weight.register_hook(lambda grad: grad * (t.rank + 1))
    before = module[2].weight.register_post_accumulate_grad_hook(functools.partial(_scale, 3 + t.rank))
    model = t.wrap(module)
    module[4].weight.register_post_accumulate_grad_hook(functools.partial(_scale, 0.5))
    module.register_full_backward_hook(lambda *_: seen.append(1))
    for _ in range(2):
        model(t.x()).sum().backward()
    before.remove()
    return grads(model), [torch.tensor(len(seen))]


@right()
def a_parameter_that_gets_an_undefined_gradient(t: Trial) -> Any:
    class Without(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad, None

    model = t.wrap(
        Made(
            lambda self, x: Without.apply(self.a(x), self.w),
            a=seeded(lambda: nn.Linear(4, 4)),
            w=nn.Parameter(torch.ones(2)),
        )
    )
    model(t.x()).sum().backward()
    return [grad if grad is not None else torch.zeros(2) for grad in grads(model)]
