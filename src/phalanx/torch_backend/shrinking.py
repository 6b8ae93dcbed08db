"""`torch.distributed.shrink_group` on Phalanx: the group of those that are left."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ..backends.mesh.backend import MeshBackend
from ..backends.mesh.view import ViewBackend
from ..backends.subgroup import SubBackend
from ..deadline import Deadline
from ..errors import PeerLost
from ..group import Group
from ..world import close_at_exit

__all__ = ["can_shrink", "register", "shrink"]


def can_shrink(group: Group) -> bool:
    """True if the group's world has a directory that can decide who goes on."""
    backend: Any = group.backend
    while isinstance(backend, SubBackend):
        backend = backend.parent
    return isinstance(backend, MeshBackend | ViewBackend)


def shrink(group: Group, excluded: Sequence[int], seconds: float) -> Group:
    """The group of all members but some. The old one is broken; if it owned the world, the new one does.

    Raises:
        PeerLost: Another member was lost meanwhile.
        Evicted, Timeout, RendezvousError: As `Group.shrink`.
    """
    wanted = [name for rank, name in enumerate(group.members) if rank not in excluded]
    owns_world = group._owns_backend and group.backend.owns_world
    backend, view = group._next_view(Deadline(seconds), excluded=excluded)
    assert isinstance(backend, ViewBackend)
    backend.timeout = group.timeout
    smaller = Group(backend, _owns_backend=True)
    if owns_world:  # torch closes the old group next
        group._owns_backend = False
        backend.own_world()
        close_at_exit(smaller)
    lost = [name for name in wanted if name not in view.members]
    if lost:
        raise PeerLost(lost[0], "it was lost while the group was being shrunk", rank=group.members[group.rank])
    return smaller


@functools.cache  # once per process
def register() -> None:
    """Has torch take the group that `shrink` made as it is.

    torch makes a group of its own around the backend that shrank, which must be one in C++: it registers that as the
    group's backend. Here the group is the backend.
    """
    module = dist.distributed_c10d
    original = getattr(module, "_create_shrunk_process_group", None)
    if original is None:
        return

    @functools.wraps(original)
    def create(new_backend: Any, remaining: list[int], metadata: dict[str, Any], is_default: bool) -> Any:
        if getattr(new_backend, "_get_backend_name", None) is None or new_backend._get_backend_name() != "phalanx":
            return original(new_backend, remaining, metadata, is_default)
        name = metadata["new_group_name"]
        new_backend._set_group_name(name)
        new_backend._store = dist.PrefixStore(f"{name}/", metadata["store"].clone())
        new_backend._set_group_desc("default:shrunken" if is_default else f"{metadata['original_group_name']}:shrunk")
        return new_backend

    module._create_shrunk_process_group = create
