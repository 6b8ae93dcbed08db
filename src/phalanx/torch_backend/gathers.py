"""Collectives that move tensors without changing them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.distributed.distributed_c10d as c10d

from ..errors import UsageError
from .reductions import TorchReductions
from .request import OperationRequest, only
from .tensor_lists import SLICE, Places, adjacent, check_alike, joined, places
from .tensors import fill, in_place, plain, source
from .visible import visible
from .work import Job

__all__ = ["TorchGathers"]


class TorchGathers(TorchReductions):
    """`broadcast`, `allgather`, `gather`, `scatter` and their kin."""

    @visible
    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None, *, root: int = 0) -> Any:
        """One rank's tensor on every rank.

        Raises:
            UsageError: The tensor cannot be sent.
            DistBackendError, DistNetworkError: As every operation: from here, or from `wait` of the work.
        """
        tensor = only(tensors, "broadcast")
        request = OperationRequest(opts, timeout=timeout, root=root)
        group, src = self.group, request.root
        array = plain(tensor)
        if array is not None:
            return self._issue(lambda seconds: group.broadcast(array, src, timeout=seconds), request, [tensor])
        if not tensor.is_cpu:
            return self._on(tensor, "broadcast")(tensors, request.options(c10d.BroadcastOptions))

        def job(seconds: float | None) -> None:
            memory = in_place(tensor)
            group.broadcast(memory.array, src, timeout=seconds)
            memory.restore()

        return self._issue(job, request, [tensor])

    # -- all gather ----------------------------------------------------------------------------------------------------

    @visible
    def all_gather_single(self, output: Any, input: Any, opts: Any = None, timeout: Any = None) -> Any:  # noqa: A002
        """The tensors of all ranks in one tensor, on every rank."""
        request = OperationRequest(opts, timeout=timeout)
        if not output.is_cpu:
            return self._on(output, "all_gather_single")(output, input, request.options(c10d.AllgatherOptions))
        self._check_parts("all_gather", output, input)
        return self._issue(self._all_gather_job(output, input), request, [output], output.nbytes)

    @visible
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        """`all_gather_single` of many tensors."""
        request = OperationRequest(opts, timeout=timeout)
        if outputs and not outputs[0].is_cpu:
            return self._on(outputs[0], "all_gather_single_coalesced")(
                outputs, inputs, request.options(c10d.AllgatherOptions)
            )
        jobs = []
        for output, part in zip(outputs, inputs, strict=True):
            self._check_parts("all_gather", output, part)
            jobs.append(self._all_gather_job(output, part))
        size = sum(output.nbytes for output in outputs)
        return self._issue(lambda seconds: [job(seconds) for job in jobs], request, list(outputs), size)

    @visible
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        """The tensors of all ranks, each in a tensor of its own, on every rank. They may differ in size."""
        tensor = only(inputs, "all_gather")
        request = OperationRequest(opts, timeout=timeout)
        if not tensor.is_cpu:
            return self._on(tensor, "allgather")(outputs, inputs, request.options(c10d.AllgatherOptions))
        targets = only(outputs, "all_gather") if outputs and isinstance(outputs[0], (list, tuple)) else outputs
        return self._issue(self._all_gather_list_job(targets, tensor), request, list(targets), tensor.nbytes)

    @visible
    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        """`allgather` of many tensors: `outputs[r][i]` is the i-th of rank r."""
        request = OperationRequest(opts, timeout=timeout)
        if inputs and not inputs[0].is_cpu:
            return self._on(inputs[0], "allgather_coalesced")(outputs, inputs, request.options(c10d.AllgatherOptions))
        if len(outputs) != self.group.world_size:
            raise UsageError(
                f"all_gather_coalesced: got {len(outputs)} lists of outputs (expected "
                f"{self.group.world_size}, one for each rank)"
            )
        jobs = [self._all_gather_list_job([row[i] for row in outputs], tensor) for i, tensor in enumerate(inputs)]
        flat = [tensor for row in outputs for tensor in row]
        return self._issue(lambda seconds: [job(seconds) for job in jobs], request, flat)

    def _all_gather_job(self, output: Any, tensor: Any) -> Job:
        group = self.group
        whole, part = plain(output), plain(tensor)
        if whole is not None and part is not None:
            return lambda seconds: group.all_gather(part, whole, timeout=seconds)

        def job(seconds: float | None) -> None:
            memory = in_place(output)
            group.all_gather(source(tensor), memory.array, timeout=seconds)
            memory.restore()

        return job

    def _all_gather_list_job(self, targets: Sequence[Any], tensor: Any) -> Job:
        group = self.group
        found = places([*targets, tensor]) if len(targets) == group.world_size else None
        if found is not None and found.size <= SLICE:
            found.addresses.pop()
            return self._short_all_gather_job(found, plain(tensor))
        check_alike("all_gather", targets, count=group.world_size)
        check_alike("all_gather", [tensor, *targets])
        counts = [target.numel() for target in targets]
        if counts[group.rank] != tensor.numel():
            raise UsageError(
                f"all_gather: this rank's tensor has {tensor.numel()} elements, but the output for it has "
                f"{counts[group.rank]}"
            )
        most = max(counts)

        def job(seconds: float | None) -> None:
            mine = source(tensor)
            if mine.size < most:  # where the ranks' tensors differ, all are filled up to the longest
                mine = np.concatenate([mine, np.zeros(most - mine.size, mine.dtype)])
            memories = [in_place(target) for target in targets]
            in_slices = len(set(counts)) > 1 or self._in_slices(mine.nbytes)
            slices = self._slices(most, mine.dtype, seconds) if in_slices else [(slice(0, most), seconds)]
            for part, left in slices:
                everyone = self._rows(part, mine.dtype)
                group.all_gather(mine[part], everyone, timeout=left)
                for row, memory in zip(everyone, memories, strict=True):
                    values = memory.array[part]
                    values[:] = row[: values.size]
            for memory in memories:
                memory.restore()

        return job

    def _short_all_gather_job(self, found: Places, part: Any) -> Job:
        """An all_gather in one piece. The caller holds the tensors; only their places are known here."""
        group, whole = self.group, found.whole

        def job(seconds: float | None) -> None:
            if whole is not None:
                group.all_gather(part, whole, timeout=seconds)
            else:
                everyone, address = self._stage(found)
                group.all_gather(part, everyone, timeout=seconds)
                found.copy_from(address)

        return job

    # -- gather and scatter --------------------------------------------------------------------------------------------

    @visible
    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, root: int = 0) -> Any:
        """The tensors of all ranks, each in a tensor of its own, on one rank."""
        tensor = only(inputs, "gather")
        request = OperationRequest(opts, timeout=timeout, root=root)
        if not tensor.is_cpu:
            return self._on(tensor, "gather")(outputs, inputs, request.options(c10d.GatherOptions))
        targets: Any = []
        if request.root == self.group.rank:
            targets = only(outputs, "gather") if outputs and isinstance(outputs[0], (list, tuple)) else outputs
            check_alike("gather", targets, count=self.group.world_size)
            check_alike("gather", [tensor, *targets])
            if {target.numel() for target in targets} != {tensor.numel()}:
                raise UsageError(
                    f"gather: this rank's tensor has {tensor.numel()} elements, but the outputs have "
                    f"{[target.numel() for target in targets]} (expected the same size everywhere)"
                )
        dst, group = request.root, self.group

        whole = adjacent(targets) if targets else None

        def job(seconds: float | None) -> None:
            mine = source(tensor)
            everyone = whole
            if everyone is None and targets:
                everyone = self._scratch(group.world_size * mine.size, mine.dtype)
            group.gather(mine, dst, everyone, timeout=seconds)
            if everyone is not None and whole is None:
                for row, target in zip(everyone.reshape(group.world_size, -1), targets, strict=True):
                    fill(target, row)

        return self._issue(job, request, list(targets))

    @visible
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, root: int = 0) -> Any:
        """The r-th tensor of one rank to rank r."""
        output = only(outputs, "scatter")
        request = OperationRequest(opts, timeout=timeout, root=root)
        if not output.is_cpu:
            return self._on(output, "scatter")(outputs, inputs, request.options(c10d.ScatterOptions))
        parts: Any = []
        if request.root == self.group.rank:
            parts = only(inputs, "scatter") if inputs and isinstance(inputs[0], (list, tuple)) else inputs
            check_alike("scatter", parts, count=self.group.world_size)
            check_alike("scatter", [output, *parts])
            if {part.numel() for part in parts} != {output.numel()}:
                raise UsageError(
                    f"scatter: this rank's output has {output.numel()} elements, but the inputs have "
                    f"{[part.numel() for part in parts]} (expected the same size everywhere)"
                )
        src, group = request.root, self.group

        def job(seconds: float | None) -> None:
            memory = in_place(output)
            group.scatter(joined(parts) if parts else None, src, memory.array, timeout=seconds)
            memory.restore()

        return self._issue(job, request, [output])
