"""Collectives that combine the tensors of all ranks, element by element."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.distributed.distributed_c10d as c10d

from ..errors import UsageError
from ..types import Op
from .base import GroupBase
from .reduce_ops import Combining, combining
from .request import OperationRequest, only
from .sparse import all_reduce_sparse
from .tensor_lists import check_alike, joined, places
from .tensors import PLAIN_DTYPES, TensorMemory, as_tensor, in_place, is_sparse, plain, source
from .visible import visible

__all__ = ["TorchReductions"]


class TorchReductions(GroupBase):
    """`allreduce` and its kin."""

    @visible
    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None, *, op: Any = None) -> Any:
        """The reduction of all ranks' tensors, on every rank.

        Raises:
            UsageError: The dtype has no such reduction.
            DistBackendError, DistNetworkError: As every operation: from here, or from `wait` of the work.
        """
        tensor = only(tensors, "all_reduce")
        request = OperationRequest(opts, timeout=timeout, op=op)
        group = self.group
        how = combining(request.op, tensor.dtype, group.world_size)
        array = plain(tensor) if how.simple else None
        if array is not None:
            name = how.name
            size = array.nbytes
            return self._issue(lambda seconds: group.all_reduce(array, name, timeout=seconds), request, [tensor], size)
        if not tensor.is_cpu:
            return self._on(tensor, "allreduce")(tensors, request.options(c10d.AllreduceOptions))
        if is_sparse(tensor):
            return self._issue(lambda seconds: all_reduce_sparse(group, tensor, request.op, seconds), request, [tensor])
        return self._issue(lambda seconds: self._all_reduce(tensor, how, seconds), request, [tensor])

    def _all_reduce(self, tensor: Any, how: Combining, seconds: float | None) -> None:
        _multiply(tensor, how)
        memory = in_place(tensor, reducing=True)
        self.group.all_reduce(memory.array, how.name, timeout=seconds)
        memory.restore()
        _divide(tensor, how)

    @visible
    def allreduce_coalesced(self, tensors: Any, opts: Any = None, timeout: Any = None, *, op: Any = None) -> Any:
        """`allreduce` of many tensors at once."""
        request = OperationRequest(opts, timeout=timeout, op=op)
        if not tensors:
            raise UsageError("all_reduce_coalesced: there are no tensors")
        if not tensors[0].is_cpu:
            return self._on(tensors[0], "allreduce_coalesced")(tensors, request.options(c10d.AllreduceCoalescedOptions))
        hows = [combining(request.op, tensor.dtype, self.group.world_size) for tensor in tensors]

        def job(seconds: float | None) -> None:
            if any(is_sparse(tensor) for tensor in tensors):
                raise UsageError("all_reduce_coalesced takes no sparse tensors (all_reduce them one by one)")
            by_name: dict[Op, list[tuple[Any, TensorMemory]]] = {}
            for tensor, how in zip(tensors, hows, strict=True):
                _multiply(tensor, how)
                by_name.setdefault(how.name, []).append((tensor, in_place(tensor, reducing=True)))
            for name, parts in by_name.items():
                self.group.all_reduce_many([memory.array for _, memory in parts], name, timeout=seconds)
                for _, memory in parts:
                    memory.restore()
            for tensor, how in zip(tensors, hows, strict=True):
                _divide(tensor, how)

        return self._issue(job, request, list(tensors))

    @visible
    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None, *, root: int = 0) -> Any:
        """The reduction of all ranks' tensors, on one rank; the others' stay as they are."""
        tensor = only(tensors, "reduce")
        request = OperationRequest(opts, timeout=timeout, op=op, root=root)
        if not tensor.is_cpu:
            return self._on(tensor, "reduce")(tensors, request.options(c10d.ReduceOptions))
        dst, mine = request.root, request.root == self.group.rank
        how = combining(request.op, tensor.dtype, self.group.world_size)

        def job(seconds: float | None) -> None:
            target = tensor
            if how.factor is not None and not mine:
                target = tensor.detach().clone()
            _multiply(target, how)
            memory = in_place(target, reducing=True)
            self.group.reduce(memory.array, dst, how.name, timeout=seconds)
            if mine:
                memory.restore()
                _divide(target, how)

        return self._issue(job, request, [tensor])

    # -- reduce and scatter --------------------------------------------------------------------------------------------

    @visible
    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> Any:
        """Rank r gets the reduction of all ranks' r-th tensors, which may differ in size."""
        output = only(outputs, "reduce_scatter")
        request = OperationRequest(opts, timeout=timeout, op=op)
        if not output.is_cpu:
            return self._on(output, "reduce_scatter")(outputs, inputs, request.options(c10d.ReduceScatterOptions))
        parts = only(inputs, "reduce_scatter") if inputs and isinstance(inputs[0], (list, tuple)) else inputs
        check_alike("reduce_scatter", parts, count=self.group.world_size)
        check_alike("reduce_scatter", [output, *parts])
        if parts[self.group.rank].numel() != output.numel():
            raise UsageError(
                f"reduce_scatter: the output has {output.numel()} elements, but the input for this rank has "
                f"{parts[self.group.rank].numel()}"
            )
        how = combining(request.op, output.dtype, self.group.world_size)

        even = len({part.numel() for part in parts}) == 1

        def job(seconds: float | None) -> None:
            if even and how.factor is None and output.dtype in PLAIN_DTYPES:
                if self._in_slices(output.nbytes):
                    self._reduce_scatter_in_slices(output, parts, how, seconds)
                    return
                if self._reduce_scatter_at_once(output, parts, how, seconds):
                    return
            everything = joined(parts, reducing=True)
            if how.factor is not None:
                multiplied = _product(as_tensor(everything), how)
                everything = source(multiplied, reducing=True)
            if even:
                self._reduce_scatter(output, everything, how, seconds)
                return
            if isinstance(everything, np.ndarray):
                everything = everything.copy()  # it may be the inputs' own memory
            self.group.all_reduce(everything, how.name, timeout=seconds)
            start = sum(part.numel() for part in parts[: self.group.rank])
            mine = as_tensor(everything)[start : start + output.numel()]
            output.detach().copy_(mine.reshape(output.shape))
            _divide(output, how)

        return self._issue(job, request, [output])

    def _reduce_scatter_at_once(self, output: Any, parts: Any, how: Combining, seconds: float | None) -> bool:
        """Does it in one piece, if the tensors are plain and lie apart."""
        target, found = plain(output), places(parts)
        if target is None or found is None or found.whole is not None:
            return False
        everything, address = self._stage(found)
        found.copy_to(address)
        self.group.reduce_scatter(everything, how.name, target, timeout=seconds)
        _divide(output, how)
        return True

    def _reduce_scatter_in_slices(self, output: Any, parts: Any, how: Combining, seconds: float | None) -> None:
        memory, sources = in_place(output, reducing=True), [source(part, reducing=True) for part in parts]
        target = memory.array
        for part, left in self._slices(target.size, target.dtype, seconds):
            rows = self._rows(part, target.dtype)
            for row, values in zip(rows, sources, strict=True):
                row[:] = values[part]
            self.group.reduce_scatter(rows.reshape(-1), how.name, target[part], timeout=left)
        memory.restore()
        _divide(output, how)

    @visible
    def reduce_scatter_single(
        self,
        output: Any,
        input: Any,  # noqa: A002  # torch's name for it
        opts: Any = None,
        timeout: Any = None,
        *,
        op: Any = None,
    ) -> Any:
        """The same with the inputs in one tensor."""
        request = OperationRequest(opts, timeout=timeout, op=op)
        if not output.is_cpu:
            return self._on(output, "reduce_scatter_single")(output, input, request.options(c10d.ReduceScatterOptions))
        self._check_parts("reduce_scatter", input, output)
        how = combining(request.op, input.dtype, self.group.world_size)
        job = self._reduce_scatter_job(output, input, how)
        return self._issue(job, request, [output], input.nbytes)

    @visible
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        """`reduce_scatter_single` of many tensors."""
        request = OperationRequest(opts, timeout=timeout)
        if outputs and not outputs[0].is_cpu:
            return self._on(outputs[0], "reduce_scatter_single_coalesced")(
                outputs, inputs, request.options(c10d.ReduceScatterOptions)
            )
        jobs = []
        for output, part in zip(outputs, inputs, strict=True):
            self._check_parts("reduce_scatter", part, output)
            jobs.append(
                self._reduce_scatter_job(output, part, combining(request.op, part.dtype, self.group.world_size))
            )
        size = sum(part.nbytes for part in inputs)
        return self._issue(lambda seconds: [job(seconds) for job in jobs], request, list(outputs), size)

    def _reduce_scatter_job(self, output: Any, values: Any, how: Combining) -> Any:
        def job(seconds: float | None) -> None:
            factored = values if how.factor is None else _product(values.detach(), how)
            self._reduce_scatter(output, source(factored, reducing=True), how, seconds)

        return job

    def _reduce_scatter(self, output: Any, everything: Any, how: Combining, seconds: float | None) -> None:
        memory = in_place(output, reducing=True)
        self.group.reduce_scatter(everything, how.name, memory.array, timeout=seconds)
        memory.restore()
        _divide(output, how)

    def _check_parts(self, what: str, whole: Any, part: Any) -> None:
        """Refuses a tensor that is not as long as one of another for each rank.

        Raises:
            UsageError: It is not, or the dtypes differ.
        """
        if whole.dtype != part.dtype:
            raise UsageError(
                f"{what}: the tensors have different dtypes ({whole.dtype}, {part.dtype}; expected one for both)"
            )
        if whole.numel() != part.numel() * self.group.world_size:
            raise UsageError(
                f"{what}: a tensor of {whole.numel()} elements was given with one of {part.numel()}, which does not "
                f"fit {self.group.world_size} ranks"
            )


def _multiply(tensor: Any, how: Combining) -> None:
    if how.factor is not None:
        tensor.detach().mul_(how.factor)


def _product(tensor: Any, how: Combining) -> Any:
    return (tensor * how.factor).to(tensor.dtype)


def _divide(tensor: Any, how: Combining) -> None:
    if how.divisor != 1:
        tensor.detach().div_(how.divisor, rounding_mode="trunc")
