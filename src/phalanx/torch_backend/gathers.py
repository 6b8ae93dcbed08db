"""Collectives that move tensors without changing them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import UsageError
from .base import SLICE, OperationRequest, only
from .reductions import TorchReductions
from .tensors import Places, TensorMemory, adjacent, check_alike, in_place, joined, places, plain, source
from .visible import visible
from .work import Job

__all__ = ["TorchGathers"]


class TorchGathers(TorchReductions):
    """`broadcast`, `allgather`, `alltoall` and their kin."""

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
            return self._on(tensor, "broadcast")(tensors, opts)

        def job(seconds: float | None) -> None:
            memory = in_place(tensor)
            group.broadcast(memory.array, src, timeout=seconds)
            memory.restore()

        return self._issue(job, request, [tensor])

    # -- all gather ----------------------------------------------------------------------------------------------------

    @visible
    def all_gather_single(self, output: Any, input: Any, opts: Any = None, timeout: Any = None) -> Any:  # noqa: A002
        """The tensors of all ranks in one tensor, on every rank."""
        if not output.is_cpu:
            return self._on(output, "all_gather_single")(output, input, opts)
        request = OperationRequest(opts, timeout=timeout)
        self._check_parts("all_gather", output, input)
        return self._issue(self._all_gather_job(output, input), request, [output], output.nbytes)

    @visible
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        """`all_gather_single` of many tensors."""
        request = OperationRequest(opts, timeout=timeout)
        if outputs and not outputs[0].is_cpu:
            return self._on(outputs[0], "all_gather_single_coalesced")(outputs, inputs, opts)
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
        if not tensor.is_cpu:
            return self._on(tensor, "allgather")(outputs, inputs, opts)
        request = OperationRequest(opts, timeout=timeout)
        targets = only(outputs, "all_gather") if outputs and isinstance(outputs[0], (list, tuple)) else outputs
        return self._issue(self._all_gather_list_job(targets, tensor), request, list(targets), tensor.nbytes)

    @visible
    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        """`allgather` of many tensors: `outputs[r][i]` is the i-th of rank r."""
        request = OperationRequest(opts, timeout=timeout)
        if inputs and not inputs[0].is_cpu:
            return self._on(inputs[0], "allgather_coalesced")(outputs, inputs, opts)
        if len(outputs) != self.group.world_size:
            raise UsageError(
                f"all_gather_coalesced: {len(outputs)} lists of outputs were given, but there are "
                f"{self.group.world_size} ranks"
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
            for part, left in self._slices(most, mine.dtype, seconds):
                everyone = self._rows(part, mine.dtype)
                group.all_gather(mine[part], everyone, timeout=left)
                for row, memory in zip(everyone, memories, strict=True):
                    values = memory.array[part]
                    values[:] = row[: values.size]
            for memory in memories:
                memory.restore()

        return job

    def _short_all_gather_job(self, found: Places, part: Any) -> Job:
        """In one piece. Whoever issues it holds the tensors, of which only the places are known here."""
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
        if not tensor.is_cpu:
            return self._on(tensor, "gather")(outputs, inputs, opts)
        request = OperationRequest(opts, timeout=timeout, root=root)
        targets: Any = []
        if request.root == self.group.rank:
            targets = only(outputs, "gather") if outputs and isinstance(outputs[0], (list, tuple)) else outputs
            check_alike("gather", targets, count=self.group.world_size)
            check_alike("gather", [tensor, *targets])
            if {target.numel() for target in targets} != {tensor.numel()}:
                raise UsageError("gather: the outputs and this rank's tensor are not all of one size")
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
                    _fill(target, row)

        return self._issue(job, request, list(targets))

    @visible
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, root: int = 0) -> Any:
        """The r-th tensor of one rank to rank r."""
        output = only(outputs, "scatter")
        if not output.is_cpu:
            return self._on(output, "scatter")(outputs, inputs, opts)
        request = OperationRequest(opts, timeout=timeout, root=root)
        parts: Any = []
        if request.root == self.group.rank:
            parts = only(inputs, "scatter") if inputs and isinstance(inputs[0], (list, tuple)) else inputs
            check_alike("scatter", parts, count=self.group.world_size)
            check_alike("scatter", [output, *parts])
            if {part.numel() for part in parts} != {output.numel()}:
                raise UsageError("scatter: the inputs and this rank's output are not all of one size")
        src, group = request.root, self.group

        def job(seconds: float | None) -> None:
            memory = in_place(output)
            group.scatter(joined(parts) if parts else None, src, memory.array, timeout=seconds)
            memory.restore()

        return self._issue(job, request, [output])

    # -- all to all ----------------------------------------------------------------------------------------------------

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
        if not output.is_cpu:
            return self._on(output, "all_to_all_single")(output, input, output_split_sizes, input_split_sizes, opts)
        request = OperationRequest(opts, timeout=timeout)
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
        if outputs and not outputs[0].is_cpu:
            return self._on(outputs[0], "alltoall")(outputs, inputs, opts)
        request = OperationRequest(opts, timeout=timeout)
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
                    _fill(output, everyone[start : start + count])
                    start += count
                return
            if self._short_all_to_all(outputs, inputs, seconds):
                return
            self._all_to_all_apart([in_place(output) for output in outputs], inputs, sending[0], seconds)

        return self._issue(job, request, list(outputs))

    def _short_all_to_all(self, outputs: Sequence[Any], inputs: Sequence[Any], seconds: float | None) -> bool:
        """Does it, if it can be done in one piece."""
        sent, received = places(inputs), places(outputs)
        if sent is None or received is None:
            return False
        parts, whole = sent.whole, received.whole
        if parts is not None and whole is not None:
            self.group.all_to_all(parts, whole, timeout=seconds)
            return True
        if sent.size > SLICE:
            return False
        both, address = self._stage(sent, 2)
        half = both.size // 2
        sent.copy_to(address)
        self.group.all_to_all(both[:half], both[half:], timeout=seconds)
        received.copy_from(address + half * sent.dtype.itemsize)
        return True

    def _all_to_all_apart(
        self, targets: list[TensorMemory], inputs: Sequence[Any], count: int, left: float | None
    ) -> None:
        sources = [source(tensor) for tensor in inputs]
        dtype = sources[0].dtype
        for part, seconds in self._slices(count, dtype, left):
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


def _fill(tensor: Any, values: Any) -> None:
    """Copies flat values to a tensor."""
    memory = in_place(tensor)
    memory.array[:] = values
    memory.restore()
