"""Steps of training as operations: a call is a step, and leaves the loss in its array."""

from __future__ import annotations

import numpy as np

from phalanx.cli.bench.operations import MeasuredOperation, add_operations

__all__ = ["ALONE", "TRAINING"]

ALONE = "-alone"
"""Ends the name of a step of training without communication."""


def _step(name: str) -> MeasuredOperation:
    return MeasuredOperation(
        name=name,
        sized=False,
        shape=lambda rank, n, count: (1, None),
        before=lambda rank, n, x: None,
        after=lambda rank, n, x, out: bool(np.isfinite(x[0]) and x[0] > 0),  # the loss
    )


TRAINING = {model: _step(model) for model in ("gpt", "layers")}
"""Models of which a step is measured."""
add_operations(_step(f"{model}{how}") for model in TRAINING for how in ("", ALONE))
