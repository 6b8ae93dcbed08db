"""Training and evaluation, and whose buffers count."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from tests.parallel.cases.table import (
    Trial,
    case,
    mlp,
    seeded,
    state,
    train,
)
from torch import nn

case("training")(lambda t: train(t, mlp()))
case("training, gradients zeroed")(lambda t: train(t, mlp(), none=False))
case("training, many buckets")(lambda t: train(t, mlp(), bucket_bytes=64))
case("evaluation mode")(lambda t: train(t, mlp(), eval_mode=True))
case("evaluation mode, many buckets")(lambda t: train(t, mlp(), eval_mode=True, bucket_bytes=64))
case("normalisation in evaluation mode")(
    lambda t: train(t, seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))), eval_mode=True)
)


@case(equal=False)
def buffers(t: Trial) -> Any:
    """Of which rank they are, after forwards of all kinds."""
    model = t.wrap(seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))))
    seen = []
    for index, kind in enumerate(
        ["train", "no_sync", "no_sync", "train", "train", "no_grad", "no_grad", "train", "eval", "eval"]
    ):
        model.train(kind not in ("no_grad", "eval"))
        with model.no_sync() if kind == "no_sync" else contextlib.nullcontext():
            with torch.no_grad() if kind == "no_grad" else contextlib.nullcontext():
                out = model(t.x(index))
            if kind != "no_grad":
                out.square().sum().backward()
        seen += [out.detach().clone(), *state(model)]
    return seen
