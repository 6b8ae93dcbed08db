"""`barrier`, and `monitored_barrier`, which names the ranks that did not come."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ..deadline import Deadline
from ..errors import PhalanxError
from .base import GroupBase
from .request import OperationRequest
from .visible import visible

__all__ = ["TorchBarriers"]

_ARRIVED, _LEAVE = (1 << 62) + 1, (1 << 62) + 2
"""Tags that no program of torch can use: it has 32 bits for them."""


class TorchBarriers(GroupBase):
    """Ways to meet."""

    @visible
    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        """Is done once every rank has called it.

        Raises:
            DistBackendError, DistNetworkError: From here, or from `wait` of the work.
        """
        if isinstance(opts, timedelta):
            opts, timeout = None, opts
        request = OperationRequest(opts, timeout=timeout)
        group = self.group
        return self._issue(lambda seconds: group.barrier(timeout=seconds), request, [])

    @visible
    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier in which rank 0 tells which ranks did not come in time. The group can go on after that.

        Raises:
            DistBackendError: On rank 0, naming the first rank that did not come, or all of them; on the others, because
                rank 0 did not let them pass.
        """
        # What was issued before comes first, as with Gloo.
        self._runner.drain()
        if isinstance(timeout, c10d.BarrierOptions):
            timeout = timeout.timeout
        if isinstance(timeout, timedelta):
            timeout = timeout.total_seconds()
        deadline = Deadline(self.group.timeout if timeout is None or timeout < 0 else timeout)
        if self.group.rank == 0:
            self._await_all(deadline, wait_all_ranks)
        else:
            self._await_first(deadline)

    def _await_all(self, deadline: Deadline, wait_all_ranks: bool) -> None:
        group, token = self.group, np.zeros(1, np.uint8)
        missing: list[int] = []
        reason: PhalanxError | None = None
        for rank in range(1, group.world_size):
            if deadline.expired and not missing:
                raise dist.DistBackendError(
                    f"Rank {group.members[0]} timed out in monitoredBarrier after {deadline.seconds * 1000:.0f} ms"
                )
            try:
                group.recv(token, rank, tag=_ARRIVED, timeout=deadline.remaining())
            except PhalanxError as error:
                reason = reason or error
                missing.append(rank)
                if not wait_all_ranks:
                    break
        if reason is not None:
            names = ", ".join(str(group.members[rank]) for rank in missing)
            ranks = f"Ranks {names}" if wait_all_ranks else f"Rank {names}"
            raise dist.DistBackendError(
                f"[Rank 0]: {ranks} failed to pass monitoredBarrier in {deadline.seconds * 1000:.0f} ms: {reason}"
            ) from reason
        for rank in range(1, group.world_size):
            group.send(token, rank, tag=_LEAVE, timeout=deadline.remaining())

    def _await_first(self, deadline: Deadline) -> None:
        group, token = self.group, np.zeros(1, np.uint8)
        try:
            group.send(token, 0, tag=_ARRIVED, timeout=deadline.remaining())
            group.recv(token, 0, tag=_LEAVE, timeout=deadline.remaining())
        except PhalanxError as error:
            me, first = group.members[group.rank], group.members[0]
            raise dist.DistBackendError(
                f"Rank {me} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
                f"from rank {first}. Please check rank {first} logs for the rank that is missing. {error}"
            ) from error
