"""Groups that believe to have cores to spare, whatever this machine has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import phalanx as px
from phalanx.backends.mesh.lane import MeshLane

__all__ = ["helped", "helpers"]


@contextmanager
def helped(group: px.Group, cores: int = 2) -> Iterator[px.Group]:
    """A group of the same ranks with so many."""
    made = MeshLane.__init__

    def with_cores(lane: MeshLane, *arguments: Any) -> None:
        made(lane, *arguments)
        lane.spare_cores = cores

    MeshLane.__init__ = with_cores  # type: ignore[method-assign]
    try:
        with group.subgroup(range(group.world_size)) as sub:
            sub.barrier()
            yield sub
    finally:
        MeshLane.__init__ = made  # type: ignore[method-assign]


def helpers() -> int:
    """Threads of this process that help."""
    found = 0
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as name:
                found += name.read().strip() == "phalanx-crew"
        except FileNotFoundError:
            continue
    return found
