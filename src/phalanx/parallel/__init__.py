"""Data-parallel training: every rank has the whole model and a part of the data; gradients are averaged.

`DDP` wraps a torch module and averages its gradients in buckets while backward still runs. For NumPy, JAX or anything
else, `average_gradients` averages a list or dict of arrays, and `DataParallel` puts the few steps of such a loop in one
place.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .arrays import DataParallel, average_gradients

if TYPE_CHECKING:
    from .ddp import DDP

__all__ = ["DDP", "DataParallel", "average_gradients"]


def __getattr__(name: str) -> Any:
    if name == "DDP":  # it needs torch, which the others do not
        return importlib.import_module(".ddp", __name__).DDP
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
