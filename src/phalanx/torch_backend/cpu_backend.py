"""The CPU backend of a process group, as torch sees it: the dispatcher leads to it.

torch 2.14 and later let a backend be written in Python. There the dispatcher's own kernels run it, and the hooks of the
group before and after it: torch's flight recorder is one. Before, the kernels are given here.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from ..errors import UsageError
from .group_interface import TorchGroup
from .visible import OPERATIONS, perform, running

__all__ = ["HAS_BACKENDS", "CpuBackend", "complete", "kernels"]

HAS_BACKENDS = "rank" in (_distributed_c10d.Backend.__init__.__doc__ or "")
"""Whether this torch lets a backend be written in Python."""


class CpuBackend(_distributed_c10d.Backend):
    """Leads from torch's dispatcher to the group that it stands for."""

    # All of them are said here: torch asks the class in Python before its own, and that one asks again.
    options: Any = None
    supports_splitting = True
    supports_coalescing = False
    supports_shrinking = False
    supports_reconfigure = False
    supports_window = False
    _supports_time_estimate = False

    def __init__(self, group: TorchGroup) -> None:
        super().__init__(group.group.rank, group.group.world_size)
        self._group = weakref.ref(group)

    @property
    def process_group(self) -> TorchGroup:
        """The group, as long as it lives.

        Raises:
            UsageError: It does not any more.
        """
        group = self._group()
        if group is None:
            raise UsageError("the process group of this backend was destroyed")
        return group

    def getBackendName(self) -> str:  # noqa: N802
        return "phalanx"

    def _get_sequence_number_for_group(self) -> int:
        return int(self.process_group._get_sequence_number_for_group())

    def set_timeout(self, timeout: Any) -> None:
        self.process_group.set_timeout(timeout)

    def shutdown(self) -> None:
        """The group ends by itself."""

    def abort(self) -> None:
        self.process_group.abort()

    def allreduce_sparse(self, *args: Any) -> Any:
        return perform(self.process_group, OPERATIONS["allreduce"], *args)


def complete() -> None:
    """Gives the backend a method for each operation that a group has; called when all of them are known."""
    for name in OPERATIONS:
        setattr(CpuBackend, name, _forward(name))


def _forward(name: str) -> Any:
    def call(self: CpuBackend, *args: Any) -> Any:
        return perform(self.process_group, OPERATIONS[name], *args)

    return call


# -- before 2.14 -------------------------------------------------------------------------------------------------------

_KERNELS = {
    "allreduce_": "allreduce",
    "allreduce_coalesced_": "allreduce_coalesced",
    "reduce_": "reduce",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_single_coalesced",
    "broadcast_": "broadcast",
    "allgather_": "allgather",
    "_allgather_base_": "all_gather_single",
    "allgather_coalesced_": "allgather_coalesced",
    "allgather_into_tensor_coalesced_": "all_gather_single_coalesced",
    "gather_": "gather",
    "scatter_": "scatter",
    "alltoall_": "alltoall",
    "alltoall_base_": "all_to_all_single",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv_anysource",
    "barrier": "barrier",
    "monitored_barrier_": "monitored_barrier",
}
"""The dispatcher's names of the operations, and the methods'."""
_DEVICES = {
    torch._C.DispatchKey.CPU: "cpu",
    torch._C.DispatchKey.SparseCPU: "cpu",
    torch._C.DispatchKey.CUDA: "cuda",
    torch._C.DispatchKey.SparseCUDA: "cuda",
}
"""The type of device that the dispatcher has found the tensors on."""
_SELECT = torch._C.DispatchKey.BackendSelect


@functools.cache  # once per process; what is returned keeps the registration alive
def kernels() -> Any:
    """Leads the dispatcher's operations to the groups of Phalanx, and leaves those of others alone.

    The place for it is where torch selects a backend by other things than a tensor's device: after everything that
    watches, and before the kernels for the devices.
    """
    library = torch.library.Library("c10d", "IMPL")
    for name, method in _KERNELS.items():
        library.impl(name, _kernel(getattr(torch.ops.c10d, name).default, method), "BackendSelect", with_keyset=True)
    return library


def _kernel(operator: Any, method: str) -> Any:
    arguments = [argument.name for argument in operator._schema.arguments]
    place = arguments.index("process_group")
    results = len(operator._schema.returns)
    tensors = 0 if "barrier" in method else place

    def kernel(keys: Any, *args: Any) -> Any:
        keys = keys.remove(_SELECT)
        group = dist.ProcessGroup.unbox(args[place])
        place_of = _DEVICES.get(keys.highestPriorityTypeId())
        if not hasattr(group, "prepare_dispatch") or place_of is None or not group.does_itself(place_of):
            return operator.redispatch(keys, *args)
        call = running.call
        operation = OPERATIONS[method]
        if call is None or call.operation is not operation:
            raise UsageError(
                f"torch.ops.c10d.{operator._schema.name.partition('::')[2]} was called with a group of Phalanx, but "
                f"torch {torch.__version__} does not tell a backend in Python what was asked for (call the function of "
                "torch.distributed, or use torch 2.14 or later)"
            )
        # A mode or a subclass may have put other tensors in the place of those of the call.
        work = perform(group, operation, *args[:tensors], *call.args[tensors:], **call.kwargs)
        if not results:
            return None
        # One that lives in C++, where no reference would keep a Python object alive.
        boxed = getattr(_distributed_c10d, "_create_work_from_future")(work.get_future()).boxed()  # noqa: B009
        return boxed if results == 1 else (args[0], boxed)

    return kernel
