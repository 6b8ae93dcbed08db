"""All to all: every rank sends a part to every other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch.distributed.distributed_c10d as c10d

from ..errors import UsageError
from .base import GroupBase
from .request import OperationRequest
from .tensor_lists import check_alike, joined, places
from .tensors import fill, in_place, plain, source
from .visible import visible

__all__ = ["TorchAllToAll"]


class TorchAllToAll(GroupBase):
    """`all_to_all_single` and `alltoall`."""

    @visible
    def all_to_all_single(
        self,
        output: Any,
        input: Any,  # noqa: A002
        output_split_sizes: Any = (),
        input_split_sizes: Any = (),
        opts: Any = None,
        timeout: Any = None,
    ) -> Any:
        """Sends the j-th part of a tensor to rank j. The parts may be of any size."""
        request = OperationRequest(opts, timeout=timeout)
        if not output.is_cpu:
            return self._on(output, "all_to_all_single")(
                output, input, output_split_sizes, input_split_sizes, request.options(c10d.AllToAllOptions)
            )
        check_alike("all_to_all", [output, input])
        sending, receiving = list(input_split_sizes), list(output_split_sizes)
        group = self.group
        if not sending and not receiving:
            for tensor in (output, input):
                if not tensor.dim() or tensor.shape[0] % group.world_size:
                    raise UsageError(
                        f"all_to_all: dim 0 of a tensor of shape {tuple(tensor.shape)} cannot be cut into "
                        f"{group.world_size} equal parts (give the split sizes)"
                    )
            whole, parts = plain(output), plain(input)
            if whole is not None and parts is not None:
                return self._issue(lambda seconds: group.all_to_all(parts, whole, timeout=seconds), request, [output])

        def job(seconds: float | None) -> None:
            memory = in_place(output)
            if not sending and not receiving:
                group.all_to_all(source(input), memory.array, timeout=seconds)
            else:
                group.all_to_all(
                    source(input),
                    memory.array,
                    send_counts=_elements(sending, input, group.world_size),
                    recv_counts=_elements(receiving, output, group.world_size),
                    timeout=seconds,
                )
            memory.restore()

        return self._issue(job, request, [output])

    @visible
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Sends the j-th tensor to rank j. They may be of any size."""
        request = OperationRequest(opts, timeout=timeout)
        if outputs and not outputs[0].is_cpu:
            return self._on(outputs[0], "alltoall")(outputs, inputs, request.options(c10d.AllToAllOptions))
        group = self.group
        for tensors in (outputs, inputs):
            check_alike("all_to_all", tensors, count=group.world_size)
        check_alike("all_to_all", [*outputs, *inputs])

        sending, receiving = ([tensor.numel() for tensor in tensors] for tensors in (inputs, outputs))

        def job(seconds: float | None) -> None:
            if not self._all_alike(sending, receiving, seconds):
                parts = joined(inputs)
                everyone = self._scratch(sum(receiving), parts.dtype)
                group.all_to_all(parts, everyone, send_counts=sending, recv_counts=receiving, timeout=seconds)
                start = 0
                for output, count in zip(outputs, receiving, strict=True):
                    fill(output, everyone[start : start + count])
                    start += count
                return
            count = sending[0]
            if self._in_slices(inputs[0].nbytes):
                self._all_to_all_apart(outputs, inputs, self._slices(count, source(inputs[0]).dtype, seconds))
            elif not self._all_to_all_at_once(outputs, inputs, seconds):
                self._all_to_all_apart(outputs, inputs, [(slice(0, count), seconds)])

        return self._issue(job, request, list(outputs))

    def _all_to_all_at_once(self, outputs: Sequence[Any], inputs: Sequence[Any], seconds: float | None) -> bool:
        """Does it in one piece, if there is nothing special about the tensors."""
        sent, received = places(inputs), places(outputs)
        if sent is None or received is None:
            return False
        parts, whole = sent.whole, received.whole
        if parts is not None and whole is not None:
            self.group.all_to_all(parts, whole, timeout=seconds)
            return True
        both, address = self._stage(sent, 2)
        half = both.size // 2
        sent.copy_to(address)
        self.group.all_to_all(both[:half], both[half:], timeout=seconds)
        received.copy_from(address + half * sent.dtype.itemsize)
        return True

    def _all_to_all_apart(
        self, outputs: Sequence[Any], inputs: Sequence[Any], slices: Iterable[tuple[slice, float | None]]
    ) -> None:
        targets, sources = [in_place(output) for output in outputs], [source(tensor) for tensor in inputs]
        dtype = sources[0].dtype
        for part, seconds in slices:
            sent, received = self._rows(part, dtype, 2).reshape(2, self.group.world_size, -1)
            for row, values in zip(sent, sources, strict=True):
                row[:] = values[part]
            self.group.all_to_all(sent.reshape(-1), received.reshape(-1), timeout=seconds)
            for row, memory in zip(received, targets, strict=True):
                memory.array[part] = row
        for memory in targets:
            memory.restore()

    def _all_alike(self, sending: list[int], receiving: list[int], seconds: float | None) -> bool:
        """Whether all ranks have tensors of one and the same size; one that has not may have a peer that has.

        To ask takes less than to exchange all the counts.
        """
        sizes = {*sending, *receiving}
        extremes = np.array([max(sizes), -min(sizes)])
        self.group.all_reduce(extremes, "max", timeout=seconds)
        return bool(extremes[0] == -extremes[1])


def _elements(rows: list[int], tensor: Any, ranks: int) -> list[int]:
    """How many elements go to each rank, or come from it: torch counts along dim 0, and evenly if it says nothing.

    Raises:
        UsageError: They are not as many as the tensor has.
    """
    length = tensor.shape[0] if tensor.dim() else 1
    wanted = rows or [length // ranks] * ranks
    if sum(wanted) != length or len(wanted) != ranks:
        raise UsageError(
            f"all_to_all: the split sizes {wanted} do not fit {ranks} ranks and dim 0 of a tensor of shape "
            f"{tuple(tensor.shape)}"
        )
    width = tensor.numel() // length if length else 0
    return [count * width for count in wanted]
