"""A group as the world of `torch.distributed`."""

from __future__ import annotations

import functools
import sys
from datetime import timedelta
from typing import Any

from ..errors import UsageError

__all__ = ["make_world"]

MARK = "made by Group.to_torch"
"""The description of process groups that are made here."""


def make_world(group: Any) -> Any:
    """The process group that `Group.to_torch` makes of a group."""
    import torch.distributed as dist

    if dist.is_initialized():
        if dist.group.WORLD.group_desc != MARK:
            raise UsageError(
                "torch.distributed has a process group of its own (call destroy_process_group() first, or leave out "
                "init_process_group())"
            )
        dist.destroy_process_group()
        _forget_meshes()
    hook = sys.excepthook  # torch puts one around it, each time
    try:
        dist.init_process_group(
            "phalanx",
            store=dist.HashStore(),
            rank=group.rank,
            world_size=group.world_size,
            timeout=timedelta(seconds=group.timeout),
            pg_options=group,
        )
    finally:
        sys.excepthook = hook
    made: Any = dist.group.WORLD
    made._set_group_desc(MARK)
    return made


def _forget_meshes() -> None:
    """Empties what torch keeps of tensors on a mesh.

    A mesh of the next world may be equal to one of the last, while this rank has another place in it: its parts of
    tensors would be those of another rank.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import debug

    debug._clear_sharding_prop_cache()
    for name in [name for name in sys.modules if name.startswith("torch.distributed.tensor.")]:
        for value in list(vars(sys.modules[name]).values()):
            if isinstance(value, functools._lru_cache_wrapper):
                value.cache_clear()
