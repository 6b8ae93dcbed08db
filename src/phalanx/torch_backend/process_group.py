"""A process group of torch whose operations are those of a Phalanx group."""

from __future__ import annotations

import contextlib
import secrets
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..backends.subgroup import SubBackend
from ..background_thread import BackgroundThread
from ..config import torch_hooks_wanted
from ..errors import PeerLost, PhalanxError, UnsupportedArray, UsageError
from ..group import Group
from ..untraced import leave_alone
from . import (
    all_to_all,
    barriers,
    base,
    cpu_backend,
    cuda_calls,
    devices,
    errors,
    fast_calls,
    gathers,
    messages,
    older_torch,
    profiled,
    reduce_ops,
    reductions,
    runner,
    shrinking,
    sparse,
    tensors,
    visible,
    work,
)
from .work import CombinedWork, FinishedWork, seconds_of

__all__ = ["PhalanxProcessGroup", "part_of"]


@older_torch.fitted
class PhalanxProcessGroup(
    gathers.TorchGathers, all_to_all.TorchAllToAll, messages.TorchMessages, barriers.TorchBarriers
):
    """The process group that `init_process_group("phalanx")` and `new_group` return.

    Args:
        group: Does the work; it is closed with this one.
        store: torch's, for callers of `get_group_store`.
        name: The group's name in torch.
    """

    def __init__(self, group: Group, store: Any, name: str = "") -> None:
        super().__init__(group)
        self._store = store
        self._name = name
        self._description = "undefined"
        self._handle = f"phalanx:{secrets.token_hex(16)}"
        self._form: Callable[[Any, int, int, float], Group] | None = None
        """Forms another world in the place of this one; None for a group that is a part of one."""
        self.hooked = cpu_backend.HAS_BACKENDS and torch_hooks_wanted()
        self._open_fast_calls()

    def __repr__(self) -> str:
        return f"<PhalanxProcessGroup {self._name!r}: {self.group!r}>"

    # -- who: torch's C++ asks by these names, its Python by those below -----------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802
        return "phalanx"

    def getRank(self) -> int:  # noqa: N802
        return self.group.rank

    def getSize(self) -> int:  # noqa: N802
        return self.group.world_size

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    def name(self) -> str:
        return "phalanx"

    def rank(self) -> int:
        return self.group.rank

    def size(self) -> int:
        return self.group.world_size

    @property
    def group_name(self) -> str:
        """The group's name in torch, the same on all ranks."""
        return self._name

    @property
    def group_desc(self) -> str:
        """The user's description of the group."""
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def _get_backend_name(self) -> str:
        return "phalanx"

    def get_group_store(self) -> Any:
        """The store that the group was made with."""
        return self._store

    # -- what torch otherwise asks of the backend behind a group: here they are one ------------------------------------

    supports_splitting = True
    supports_coalescing = False
    supports_time_estimate = False

    @property
    def supports_shrinking(self) -> bool:
        """True if `torch.distributed.shrink_group` works: the world must have a directory that decides."""
        return shrinking.can_shrink(self.group)

    def shrink(self, ranks_to_exclude: Sequence[int], shrink_flags: int = 0, opts: Any = None) -> PhalanxProcessGroup:
        """The group of all ranks but some: what `torch.distributed.shrink_group` asks for.

        Only the others call it. They agree by the directory, so that all get the same group or an error; those that
        are left out are not waited for.

        Args:
            ranks_to_exclude: Ranks of this group, most likely those that are lost.
            shrink_flags: Of no use here: operations under way always end with an error.
            opts: Of no use here: the new group has this one's options.

        Raises:
            DistBackendError, DistNetworkError: Another rank was lost meanwhile, or not all that are left called it.
        """
        try:
            group = shrinking.shrink(self.group, ranks_to_exclude, self._runner.default)
        except PhalanxError as error:
            raise errors.translated(error) from None
        made = PhalanxProcessGroup(group, self._store, f"{self._name}:{group.epoch}")
        made._set_group_desc(f"{self._description}:shrunk")
        return made

    @property
    def _device_types(self) -> list[Any]:
        return devices.device_types(self)

    def _get_backend(self, device: Any) -> Any:
        """This group for the CPU, what torch made for another device.

        Raises:
            RuntimeError: There is none for that device, as torch says it.
        """
        device = torch.device(device)
        if device.type == "cpu":
            return self
        try:
            return self._for(device)._get_backend(device)
        except UnsupportedArray as error:
            raise RuntimeError(f"the group {self._name!r} has no backend for {device}") from error

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> PhalanxProcessGroup | None:
        """A group of some ranks of this one, in this order: what `torch.distributed.split_group` asks for.

        Args:
            opts: Of no use here: a part of a world has the world's options.
            device_types: Of no use here: torch's table of groups says which devices the new one has.

        Returns:
            The group; None on a rank that is not in it.
        """
        if self.group.rank not in ranks:
            return None
        seconds = seconds_of(timeout)
        part = part_of(self.group, ranks, self._runner.default if seconds is None else seconds)
        name = group_name or f"{self._name}:split:{part._context.hex()}"
        made = PhalanxProcessGroup(part, dist.PrefixStore(f"{name}/", self._store), name)
        made._set_group_desc(group_desc or f"{self._description}:split")
        return made

    supports_reconfigure = True

    def get_reconfigure_handle(self) -> str:
        """A name of this process's group, for `reconfigure` on all that are to be in it."""
        return self._handle

    def reconfigure(self, opts: Any) -> Any:
        """Gives this group other members, dead ones left out and new ones among them: torch 2.14 and later.

        They form a world of their own, and meet in torch's store, which must still be there.

        Args:
            opts: `uuid`, the number of this new beginning; `handles` of all members, a list in the order of ranks or a
                set; `timeout`.

        Returns:
            A handle that is done.

        Raises:
            UsageError: This group's handle is not among them.
            DistNetworkError: The world did not form; names the ranks that are missing.
        """
        handles = list(opts.handles) if isinstance(opts.handles, list) else sorted(opts.handles)
        if self._handle not in handles:
            raise UsageError("the handle of this group (get_reconfigure_handle) is not among those of the new members")
        if self._form is None:
            raise UsageError("only the default group can be reconfigured (make the others again with new_group)")
        store = dist.PrefixStore(f"phalanx/reconfigure/{opts.uuid}/", self._store)
        seconds = seconds_of(opts.timeout)
        seconds = self._runner.default if seconds is None else seconds
        try:
            formed = self._form(store, handles.index(self._handle), len(handles), seconds)
        except PhalanxError as error:
            raise errors.translated(error) from None
        old, runners = self.group, (self._runner, *self._lines)
        self._use(formed)
        self._open_fast_calls()
        for runner_ in runners:
            runner_.stop()
        BackgroundThread(old.close, "phalanx-close").start()  # its members may be gone, and goodbyes take time
        return FinishedWork.of([])

    def perform_nocolor_split(self, device: Any) -> None:
        """Called on a rank that is not in a group that others make: nothing has to be done."""

    def eager_connect_single_device(self, device: Any) -> None:
        """Connects before the first operation, which the world has done."""

    def register_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        """Has a function called before every operation (torch 2.14 and later)."""
        self.hooked = True
        self._open_fast_calls()
        return super().register_pre_hook(*args, **kwargs)

    def register_post_hook(self, *args: Any, **kwargs: Any) -> Any:
        """Has a function called after every operation was begun (torch 2.14 and later)."""
        self.hooked = True
        self._open_fast_calls()
        return super().register_post_hook(*args, **kwargs)

    def _set_sequence_number_for_group(self) -> None:
        """Every group of Phalanx counts from 0 on all its ranks."""

    def _get_sequence_number_for_group(self) -> int:
        return self.group._journal.sequence

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the default time limit of operations."""
        seconds = seconds_of(timeout)
        if seconds is None:
            raise UsageError(f"timeout={timeout} is not valid (expected more than 0 seconds)")
        self._seconds = None if seconds == self.group.timeout else seconds
        self._runner.default = seconds
        self._open_fast_calls()

    def supports_tensor_alloc(self, device: Any) -> bool:
        """Whether `allocate_tensor` has memory for that device. FSDP2 asks, if it is told to."""
        return bool(torch.device(device).type == "cpu")

    def allocate_tensor(self, size: int, *, dtype: Any, device: Any = "cpu") -> Any:
        """A flat tensor in memory that the ranks of a host share, while there is room: collectives need not copy it.

        Its values are arbitrary. If it is the group's first call, all ranks make it.

        Raises:
            DistBackendError, DistNetworkError: As every operation.
        """
        if self.group._engine is None:
            self.barrier().wait()  # in its turn, which `Group.empty` knows nothing of
        memory = self.group.empty((size * dtype.itemsize,), np.uint8)
        return torch.from_numpy(memory).view(dtype)

    # -- several operations as one -------------------------------------------------------------------------------------

    def _start_coalescing(self, device: Any) -> None:
        self._coalesced = []
        self._open_fast_calls()

    def _end_coalescing(self, device: Any) -> Any:
        works, self._coalesced = self._coalesced or [], None
        self._open_fast_calls()
        return CombinedWork(works) if works else FinishedWork.of([])

    # -- the end -------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Waits for all operations, leaves the group, and frees everything. May be called twice."""
        super().shutdown()
        self._runner.stop()
        elsewhere, self.device_groups = list(self.device_groups.values()), {}
        for group in elsewhere:
            if group is not None:
                group.shutdown()
        self.group.close()

    def abort(self) -> None:
        """Ends the group at once, on all its ranks: their operations, now and later, fail and name this rank.

        If it is the group that formed the world, the world ends with it.
        """
        group = self.group
        if not group.closed:
            with contextlib.suppress(PhalanxError):
                rank = group.members[group.rank]
                reason = PeerLost(rank, "it aborted this process group", rank=rank)
                group._health.fail(reason)
                if group.backend.owns_world:
                    group.abort("its process group was aborted")
                else:
                    group._control.break_group(group._context, reason)
        self.shutdown()


def part_of(parent: Group, ranks: Sequence[int], seconds: float) -> Group:
    """A group of some ranks of another one, in this order. The other ranks take no part."""
    backend = SubBackend(parent.backend, ranks, keep_order=True)
    backend.timeout = seconds
    return Group(backend, _owns_backend=True)


_MODULES = (
    barriers,
    base,
    cpu_backend,
    cuda_calls,
    devices,
    errors,
    fast_calls,
    gathers,
    messages,
    older_torch,
    profiled,
    reduce_ops,
    reductions,
    runner,
    shrinking,
    sparse,
    tensors,
    visible,
    work,
)
cpu_backend.complete()
leave_alone([*_MODULES, sys.modules[__name__]])
