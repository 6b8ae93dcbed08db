"""Several backwards, partial ones, ones that make a graph; accumulation."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch
from tests.parallel.cases.table import (
    Made,
    Trial,
    case,
    grads,
    mlp,
    quiet,
    right,
    seeded,
    state,
    step,
)
from torch import nn


@right()
def two_backwards_on_one_forward(t: Trial) -> Any:
    model = t.wrap(mlp(), bucket_bytes=64)
    loss = model(t.x()).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return grads(model)


@right()
def two_forwards_then_two_backwards(t: Trial) -> Any:
    model = t.wrap(mlp(), bucket_bytes=64)
    losses = [model(t.x(index)).square().sum() for index in range(2)]
    for loss in losses:
        loss.backward()
    return grads(model)


@right()
def two_forwards_then_one_backward(t: Trial) -> Any:
    model = t.wrap(mlp(), bucket_bytes=64)
    (model(t.x(0)).sum() * model(t.x(1)).sum()).backward()
    return grads(model)


def _two_heads() -> Any:
    def call(self: Any, x: Any) -> Any:
        x = torch.tanh(self.body(x))
        return {"a": self.a(x), "rest": [self.b(x), None, "text"]}

    return Made(call, **{name: seeded(lambda: nn.Linear(4, 4)) for name in ("body", "a", "b")})


@right()
def backward_through_some_outputs(t: Trial) -> Any:
    model = t.wrap(_two_heads(), find_unused_parameters=True)
    model(t.x())["a"].sum().backward()
    first = grads(model)
    out = model(t.x(1))
    out["rest"][0].sum().backward(retain_graph=True)
    out["a"].sum().backward()
    return first, grads(model)


@right()
def backward_to_some_inputs(t: Trial) -> Any:
    module = mlp()
    model = t.wrap(module, find_unused_parameters=True)
    model(t.x()).sum().backward(inputs=[module[4].weight, module[0].bias])
    return grads(model)


@case()
def gradient_penalty(t: Trial) -> Any:
    model = t.wrap(mlp(), bucket_bytes=64)
    found = []
    for index in range(2):
        model.zero_grad()
        x = t.x(index).requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (out.square().sum() + slope.square().sum()).backward()
        found += grads(model)
    return found


@right()
def backward_that_makes_a_graph(t: Trial) -> Any:
    model = t.wrap(mlp())
    with quiet():
        model(t.x()).square().sum().backward(create_graph=True)
    return grads(model)


@right()
def gradients_of_autograd_grad_are_not_touched(t: Trial) -> Any:
    model = t.wrap(mlp())
    found = torch.autograd.grad(model(t.x()).sum(), list(model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert len(found) == 6
    model(t.x(1)).sum().backward()
    return grads(model)


@right()
def backward_in_another_thread(t: Trial) -> Any:
    model = t.wrap(mlp())
    thread = threading.Thread(target=model(t.x()).sum().backward)
    thread.start()
    thread.join()
    return grads(model)


@case(equal=False)
def the_module_itself_is_not_averaged(t: Trial) -> Any:
    model = t.wrap(mlp())
    model(t.x()).sum().backward()
    model.zero_grad()
    model.module(t.x()).sum().backward()
    return grads(model)


@case()
def accumulation(t: Trial) -> Any:
    model = t.wrap(mlp(), bucket_bytes=64)
    for index in range(6):
        with model.no_sync() if index % 3 < 2 else contextlib.nullcontext():
            model(t.x(index)).square().sum().backward()
        if index % 3 == 2:
            step(model)
            model.zero_grad(set_to_none=index == 2)
    return state(model), grads(model)


@case()
def accumulation_without_no_sync(t: Trial) -> Any:
    model = t.wrap(mlp())
    for index in range(3):
        model(t.x(index)).square().sum().backward()
    return grads(model)


@case()
def forward_outside_and_backward_inside_no_sync(t: Trial) -> Any:
    model = t.wrap(mlp())
    loss = model(t.x()).sum()
    with model.no_sync():
        loss.backward()
    return grads(model)


@case(equal=False)
def forward_inside_and_backward_outside_no_sync(t: Trial) -> Any:
    model = t.wrap(mlp())
    with model.no_sync():
        loss = model(t.x()).sum()
    loss.backward()
    return grads(model)
