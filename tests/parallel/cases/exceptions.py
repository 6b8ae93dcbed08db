"""Exceptions that the loop catches, to go on with the next step."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from tests.parallel.cases.table import (
    Blocks,
    Trial,
    grads,
    right,
)

import phalanx as px


class Boom(torch.autograd.Function):  # type: ignore[misc]
    """Passes values on; raises in backward if told to."""

    @staticmethod
    def forward(ctx: Any, x: Any, armed: bool) -> Any:
        ctx.armed = armed
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if ctx.armed:
            raise ValueError("boom")
        return grad, None


def caught(t: Trial, where: dict[int, int], bucket_bytes: int, none: bool) -> Any:
    """Every other backward raises after some blocks, on some ranks; all go on with the next step."""
    place = where.get(t.rank, where.get(-1))
    broken = False

    def around(index: int, block: Any, x: Any) -> Any:
        # Backward passes here after the blocks behind, and before this one.
        return block(Boom.apply(x, broken and index == place))

    model = t.wrap(Blocks(around), bucket_bytes=bucket_bytes)
    found, kept = [], []
    for index in range(6):
        model.zero_grad(set_to_none=none)
        broken = index % 2 == 0
        try:
            model(t.x(index).requires_grad_()).square().sum().backward()
        except (ValueError, px.Desync) as error:
            kept.append(error)
            continue
        if index % 2:
            found += grads(model)
    if t.ours:
        assert len(kept) == 3, kept
        assert all(isinstance(error, ValueError if place is not None else px.Desync) for error in kept), kept
    return found


for words, where in {
    "on all ranks, first": {-1: 2},
    "on all ranks, in the middle": {-1: 1},
    "on all ranks, last": {-1: 0},
    "on rank 1, first": {1: 2},
    "on rank 1, in the middle": {1: 1},
    "on rank 1, last": {1: 0},
    "at different places": {0: 2, -1: 0},
}.items():
    right(f"backward raises {words}")(functools.partial(caught, where=where, bucket_bytes=16, none=True))
    right(f"backward raises {words}, one bucket")(
        functools.partial(caught, where=where, bucket_bytes=1 << 20, none=False)
    )


@right()
def backward_raises_and_the_same_graph_is_tried_again(t: Trial) -> Any:
    class Once(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            calls.append(1)
            if len(calls) == 1:
                raise ValueError("once")
            return grad

    calls: list[int] = []
    model = t.wrap(Blocks(lambda index, block, x: block(Once.apply(x) if index == 1 else x)), bucket_bytes=16)
    loss = model(t.x()).square().sum()
    with contextlib.suppress(ValueError):
        loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    return grads(model)


@right()
def forward_raises_on_one_rank_which_tries_again(t: Trial) -> Any:
    def around(index: int, block: Any, x: Any) -> Any:
        if failing and index == 1:
            raise ValueError("bad batch")
        return block(x)

    model = t.wrap(Blocks(around))
    found = []
    for index in range(3):
        model.zero_grad()
        failing = t.rank == 1 and index == 1
        with contextlib.suppress(ValueError):
            model(t.x(7))
        failing = False
        model(t.x(index)).square().sum().backward()
        found += grads(model)
    return found
