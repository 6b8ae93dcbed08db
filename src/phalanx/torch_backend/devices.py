"""Tensors that are not on the CPU: Phalanx's own on a GPU, or those of `init_process_group("cpu:phalanx,cuda:nccl")`.

torch makes the backends of such a group one after another, and stops at one that is a whole group, as Phalanx's is. So
those for the other devices are made here, by torch, when the first tensor comes that needs one.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from ..errors import UnsupportedArray
from .cuda_calls import CudaCalls
from .group_interface import TorchGroup
from .visible import OLDER_NAMES

__all__ = ["are_own", "device_types", "group_for", "operation_of"]


def _backends(group: TorchGroup) -> Mapping[str, str]:
    """The backend's name for each type of device but the CPU, as the user asked for it."""
    return _backends_of(str(c10d._world.pg_backend_config.get(group, "")))


@functools.lru_cache
def _backends_of(config: str) -> Mapping[str, str]:
    # Kept: torch asks for it in every barrier, and whether there is a GPU takes a call of the driver.
    pairs = (entry.partition(":") for entry in config.split(",") if ":" in entry)
    found = {device: name for device, _, name in pairs if device != "cpu"}
    if found.get("cuda") == "phalanx" and not torch.cuda.is_available():
        del found["cuda"]  # what torch makes of the name alone, also where there is no GPU
    return found


def device_types(group: TorchGroup) -> list[Any]:
    """The devices that the group takes tensors from, the CPU first."""
    kinds = [kind for kind in _backends(group) if group.device_groups.get(kind, True) is not None]
    return [torch.device("cpu"), *map(torch.device, kinds)]


def are_own(group: TorchGroup, device_type: str) -> bool:
    """Whether tensors on that type of device are left to Phalanx itself."""
    return _backends(group).get(device_type) == "phalanx"


def group_for(group: TorchGroup, device: Any) -> Any:
    """The operations of the same ranks on another device: Phalanx's own, or those of a group that torch makes.

    Raises:
        UnsupportedArray: The user has asked for no backend for that device.
    """
    name = _backends(group).get(device.type)
    if name == "phalanx" and device.type == "cuda":
        if group.fast_calls is not None:
            group.fast_calls.takes_gpu = True
        return CudaCalls(group)
    if name is None or name == "phalanx":
        raise UnsupportedArray(
            f"a tensor on {device} cannot be sent by this group, which was made for CPU tensors (for tensors on a GPU "
            "make it with backend='phalanx' or 'cpu:phalanx,cuda:nccl')"
        )
    members = group.group.members
    made, _ = c10d._new_process_group_helper(
        group.group.world_size,
        group.group.rank,
        list(members),
        c10d.Backend(f"{device.type}:{name}"),
        group.get_group_store(),
        f"{group.group_name}/{device.type}",
        timeout=timedelta(seconds=group.group.timeout),
        group_desc=f"{group.group_desc} on {device.type}",
    )
    c10d._world.pg_group_ranks[made] = {rank: index for index, rank in enumerate(members)}
    return made


def operation_of(group: Any, name: str) -> Any:
    """An operation of a group of torch's own, under the name that this torch has for it."""
    return getattr(group, name if hasattr(group, name) else OLDER_NAMES.get(name, name))
