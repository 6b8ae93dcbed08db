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
    from .fsdp import FSDP
    from .sync_batch_norm import SyncBatchNorm

__all__ = ["DDP", "FSDP", "DataParallel", "SyncBatchNorm", "average_gradients"]

_NEED_TORCH = {"DDP": "ddp", "FSDP": "fsdp", "SyncBatchNorm": "sync_batch_norm"}
"""Their modules, which are imported when they are used."""


def __getattr__(name: str) -> Any:
    if name in _NEED_TORCH:
        return getattr(importlib.import_module(f".{_NEED_TORCH[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
