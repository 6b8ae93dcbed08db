"""Ranks of torch in processes of their own, forked from one that has imported torch."""

from __future__ import annotations

import builtins
import importlib
import tempfile
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

# These are there before the ranks are forked: the compiler, which data parallel asks for, takes seconds.
import torch._dynamo
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.tensor.debug
import torch.profiler

import phalanx.torch_backend.create
from phalanx import Group
from phalanx.testing import run_ranks

__all__ = [
    "TORCH",
    "all_gather_single",
    "functional_all_gather",
    "functional_reduce_scatter",
    "phalanx",
    "reduce_scatter_single",
    "together",
]


TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
"""Its version."""


def _either(module: Any, new: str, old: str) -> Any:
    """A function that torch has renamed in 2.13; there the old name warns."""
    return getattr(module, new, None) or getattr(module, old)


all_gather_single = _either(dist, "all_gather_single", "all_gather_into_tensor")
reduce_scatter_single = _either(dist, "reduce_scatter_single", "reduce_scatter_tensor")
functional_all_gather = _either(functional, "all_gather_single", "all_gather_tensor")
functional_reduce_scatter = _either(functional, "reduce_scatter_single", "reduce_scatter_tensor")


def together(
    n: int,
    body: Callable[..., Any],
    *args: Any,
    backend: str = "phalanx",
    seconds: float = 20.0,
    env: Mapping[str, str] | None = None,
    may_die: Collection[int] = (),
    timeout: float = 60.0,
) -> list[Any]:
    """Runs `body(rank, *args)` on `n` ranks of torch, and returns what each returned."""

    def rank_of_torch(group: Group, path: str) -> Any:
        # The function is shipped without its module, where pytest's rewritten assertions look for these.
        setattr(builtins, "@py_builtins", builtins)
        setattr(builtins, "@pytest_ar", importlib.import_module("_pytest.assertion.rewrite"))
        rank, size = group.rank, group.world_size
        group.close()
        torch.set_num_threads(1)
        dist.init_process_group(
            backend, init_method=f"file://{path}", rank=rank, world_size=size, timeout=timedelta(seconds=seconds)
        )
        result = body(rank, *args)
        if dist.is_initialized():
            dist.destroy_process_group()
        return result

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "store")
        return run_ranks(n, rank_of_torch, path, backend="mesh", env=env, may_die=may_die, timeout=timeout)
