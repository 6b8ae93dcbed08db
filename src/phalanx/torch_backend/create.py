"""Makes a process group when torch asks for one."""

from __future__ import annotations

import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from ..backends.base import LaneBackend
from ..backends.mesh.backend import MeshBackend
from ..backends.simulated import SimulatedBackend
from ..config import Launch, Options, Timeouts, operation_timeout, timeouts
from ..deadline import Deadline
from ..errors import PhalanxError
from ..frames import hides_frames
from ..group import Group
from ..group.tracking import call_site
from ..world import close_at_exit
from . import functional, joining, rendezvous, shrinking
from .errors import translated
from .process_group import PhalanxProcessGroup, part_of

__all__ = ["create", "times_of"]

# Errors name the line of the user's program, not one of those between it and a group.
for _path in (
    f"{Path(__file__).parent}/",
    f"{Path(torch.__file__).parent}/",
    "<eval_with_key>",  # what torch.compile makes
    str(Path(tempfile.gettempdir(), "torchinductor_")),
):
    call_site.add_library(_path)


@hides_frames
def create(options: Any, backend_options: Any = None) -> PhalanxProcessGroup:
    """The group that `torch.distributed` asks for.

    The first one forms the world; later ones are sub-groups of it, made without the other ranks. Where the
    default group is not Phalanx's, a group is a world of its own.

    Args:
        options: torch's `_DistributedBackendOptions`.
        backend_options: What the user passed as `pg_options`: `phalanx.Options` or None; or a group, whose ranks are
            to be torch's world (`Group.to_torch`).

    Raises:
        DistNetworkError: The world did not form; names the ranks that are missing.
        ConfigError: It cannot, as it was asked for.
    """
    functional.register()
    joining.register()
    shrinking.register()
    rank, size = options.group_rank, options.group_size
    try:
        times = times_of(options.timeout)
        parent = _parent(list(options.global_ranks_in_group))
        chosen = _chosen(backend_options)
        if isinstance(backend_options, Group):
            group = part_of(backend_options, range(size), times.operation)
        elif getattr(options, "enable_reconfigure", False):  # alone, until `reconfigure` says who the others are
            group = _world(options.store, 0, 1, times, chosen)
        elif parent is None:
            group = _world(options.store, rank, size, times, chosen)
        else:
            group = part_of(parent.group, list(options.global_ranks_in_group), times.operation)
    except PhalanxError as error:
        raise translated(error) from None
    made = PhalanxProcessGroup(group, options.store, str(options.group_id))
    if parent is None and not isinstance(backend_options, Group):
        made._form = lambda store, rank, size, seconds: _world(store, rank, size, Timeouts(seconds, seconds), chosen)
    return made


def times_of(timeout: Any) -> Timeouts:
    """The time of an operation, and of forming the world. Where the program gives none, torch gives half an hour."""
    given = timeout.total_seconds() if isinstance(timeout, timedelta) else timeouts(None).operation
    return Timeouts(operation_timeout(given) if timeout == default_pg_timeout else given, given)


def _chosen(backend_options: Any) -> Options:
    return (backend_options if isinstance(backend_options, Options) else Options()).resolve()


def _parent(ranks: list[int]) -> PhalanxProcessGroup | None:
    """The default group, if this one can be a part of it."""
    if not ranks or not dist.is_initialized():
        return None
    default = dist.distributed_c10d._get_default_group()
    return default if isinstance(default, PhalanxProcessGroup) else None


def _world(store: Any, rank: int, size: int, times: Timeouts, options: Options) -> Group:
    backend: LaneBackend
    if size == 1:
        backend = SimulatedBackend.create_group(1, timeout=times.operation)[0]
    else:
        deadline = Deadline(times.meeting)
        meeting = rendezvous.arrange(store, rank, size, options=options, deadline=deadline)
        launch = Launch(
            rank=rank,
            world_size=size,
            local_rank=0,
            local_world_size=1,
            single_host=meeting.all_local,
            master=meeting.addresses[0],
            directory=None,
            master_port_taken=False,
            token=meeting.token,
            launcher="torch",
            job="",
        )
        try:
            backend = MeshBackend.from_launch(
                launch, auth="token", timeout=deadline.remaining(), options=options, meeting=meeting
            )
        except BaseException:
            meeting.close()
            raise
        backend.timeout = times.operation
    group = Group(backend, _owns_backend=True)
    close_at_exit(group)
    return group
