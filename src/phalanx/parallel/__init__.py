"""Training on many ranks: each has the whole model and a part of the data, or a part of the model.

`DDP` wraps a torch module and averages its gradients in buckets while backward still runs. For NumPy, JAX or anything
else, `average_gradients` averages a list or dict of arrays, and `DataParallel` puts the few steps of such a loop in one
place. `Pipeline` gives each rank some layers of a model.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .arrays import DataParallel, average_gradients

if TYPE_CHECKING:
    from .ddp import DDP
    from .fsdp import FSDP
    from .pipeline.pipeline import Pipeline
    from .pipeline.schedules import PipelineSchedule
    from .sync_batch_norm import SyncBatchNorm

__all__ = ["DDP", "FSDP", "DataParallel", "Pipeline", "PipelineSchedule", "SyncBatchNorm", "average_gradients"]

_LAZY = {
    "DDP": "ddp",
    "FSDP": "fsdp",
    "Pipeline": "pipeline.pipeline",
    "PipelineSchedule": "pipeline.schedules",
    "SyncBatchNorm": "sync_batch_norm",
}
"""Their modules, which are imported when they are used: most need torch."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
