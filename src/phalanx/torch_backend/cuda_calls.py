"""Operations on tensors that lie on a GPU, for a process group whose backend for them is Phalanx.

An operation has ended when its work has: also on the GPU, so its result can be used on any stream. A synchronous one is
ordered behind the current stream. An asynchronous one is ordered behind what the current stream had to do when it was
issued, and runs on a stream of its own.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch

from ..cuda.arrays import device_array
from ..cuda.host_copies import LONGEST, host_address, host_copies
from ..deadline import Deadline
from ..errors import Timeout, UsageError
from .message_work import MessageWork
from .reduce_ops import Combining, combining
from .request import OperationRequest, only
from .sparse import all_reduce_sparse
from .tensor_lists import check_alike
from .tensors import OTHER_DTYPES, in_place, is_sparse
from .visible import OLDER_NAMES, OPERATIONS
from .work import Job

__all__ = ["CudaCalls"]

LENT_FROM = 2 << 20
"""Bytes above which a message is copied inside the GPU, if the ranks share it. With the threads that torch's messages
need, two ranks of an H200 exchange tensors in 1.5 ms so, whatever their length, and send one in 0.8. Through the host
it is 0.5 and 0.4 for 1 MiB, and more in proportion."""
SHORT = 16 << 10
"""Bytes up to which a message is sent in the calling thread, as on the CPU."""
PAUSE = 20e-6
"""Seconds between two looks whether a stream has done what is left."""


class CudaCalls:
    """The operations of a process group on CUDA tensors, under torch's names.

    Args:
        owner: The process group.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = weakref.proxy(owner)
        for new, old in OLDER_NAMES.items():
            setattr(self, old, getattr(self, new))

    def _get_backend(self, _device: Any) -> Any:
        return self._owner._get_backend("cpu")

    def shutdown(self) -> None:
        """The process group ends by itself."""

    # -- reductions ----------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        tensor, request = only(tensors, "all_reduce"), OperationRequest(opts)
        if is_sparse(tensor):
            return self._issue(lambda seconds: self._all_reduce_sparse(tensor, request, seconds), request, [tensor])
        how = self._combining(request, tensor)
        return self._issue(lambda seconds: self._all_reduce(tensor, how, seconds), request, [tensor])

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        request = OperationRequest(opts)
        hows = [self._combining(request, tensor) for tensor in tensors]

        def job(seconds: float | None) -> None:
            for tensor, how in zip(tensors, hows, strict=True):
                self._all_reduce(tensor, how, seconds)

        return self._issue(job, request, list(tensors))

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        tensor, request = only(tensors, "reduce"), OperationRequest(opts)
        how, dst = self._combining(request, tensor), request.root
        mine = dst == self._group.rank

        def job(seconds: float | None) -> None:
            target = tensor.detach() if mine or how.factor is None else tensor.detach().clone()
            _multiply(target, how)
            with _flattened(target, write=mine) as flat:
                self._group.reduce(flat, dst, how.name, timeout=seconds)
            if mine:
                _divide(target, how)

        return self._issue(job, request, [tensor])

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        output, request = only(outputs, "reduce_scatter"), OperationRequest(opts)
        parts = only(inputs, "reduce_scatter") if inputs and isinstance(inputs[0], (list, tuple)) else inputs
        rank, sizes = self._group.rank, [part.numel() for part in parts]
        check_alike("reduce_scatter", parts, count=self._group.world_size)
        check_alike("reduce_scatter", [output, *parts])
        if sizes[rank] != output.numel():
            raise UsageError(
                f"reduce_scatter: the output has {output.numel()} elements, but the input for this rank has "
                f"{sizes[rank]}"
            )
        how = self._combining(request, output)

        def job(seconds: float | None) -> None:
            everything = _joined(parts)
            if len(set(sizes)) == 1:
                self._reduce_scatter(output, everything, how, seconds)
                return
            self._all_reduce(everything, how, seconds)
            output.detach().copy_(everything.split(sizes)[rank].reshape(output.shape))

        return self._issue(job, request, [output])

    def reduce_scatter_single(self, output: Any, values: Any, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([output], [values], opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        request = OperationRequest(opts)
        for output, values in zip(outputs, inputs, strict=True):
            self._owner._check_parts("reduce_scatter", values, output)
        hows = [self._combining(request, output) for output in outputs]

        def job(seconds: float | None) -> None:
            for output, values, how in zip(outputs, inputs, hows, strict=True):
                self._reduce_scatter(output, values.detach(), how, seconds)

        return self._issue(job, request, list(outputs))

    # -- moves ---------------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        tensor, request = only(tensors, "broadcast"), OperationRequest(opts)

        def job(seconds: float | None) -> None:
            with _flattened(_movable(tensor), write=request.root != self._group.rank) as flat:
                self._group.broadcast(flat, request.root, timeout=seconds)

        return self._issue(job, request, [tensor])

    def all_gather_single(self, output: Any, values: Any, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [values], opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        request = OperationRequest(opts)
        for output, values in zip(outputs, inputs, strict=True):
            self._owner._check_parts("all_gather", output, values)

        def job(seconds: float | None) -> None:
            for output, values in zip(outputs, inputs, strict=True):
                with _flattened(_movable(output), write=True) as everyone:
                    self._group.all_gather(_movable(values).reshape(-1), everyone, timeout=seconds)

        return self._issue(job, request, list(outputs))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        tensor, request = only(inputs, "all_gather"), OperationRequest(opts)
        targets = only(outputs, "all_gather") if outputs and isinstance(outputs[0], (list, tuple)) else outputs
        job = self._all_gather_job(targets, tensor)
        return self._issue(job, request, list(targets))

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        request = OperationRequest(opts)
        jobs = [self._all_gather_job([row[i] for row in outputs], tensor) for i, tensor in enumerate(inputs)]
        flat = [tensor for row in outputs for tensor in row]
        return self._issue(lambda seconds: [job(seconds) for job in jobs], request, flat)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        tensor, request = only(inputs, "gather"), OperationRequest(opts)
        targets: Any = []
        if request.root == self._group.rank:
            targets = only(outputs, "gather") if outputs and isinstance(outputs[0], (list, tuple)) else outputs
            check_alike("gather", targets, count=self._group.world_size)
            check_alike("gather", [tensor, *targets])

        def job(seconds: float | None) -> None:
            everyone, apart = _memory_for(targets, tensor) if targets else (None, False)
            self._group.gather(_movable(tensor).reshape(-1), request.root, everyone, timeout=seconds)
            if apart:
                _spread(everyone, targets)

        return self._issue(job, request, list(targets) or [tensor], list(targets))

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        output, request = only(outputs, "scatter"), OperationRequest(opts)
        parts: Any = []
        if request.root == self._group.rank:
            parts = only(inputs, "scatter") if inputs and isinstance(inputs[0], (list, tuple)) else inputs
            check_alike("scatter", parts, count=self._group.world_size)
            check_alike("scatter", [output, *parts])

        def job(seconds: float | None) -> None:
            everything = _movable(_one(parts, output)) if parts else None
            with _flattened(_movable(output), write=True) as target:
                self._group.scatter(everything, request.root, target, timeout=seconds)

        return self._issue(job, request, [output])

    def all_to_all_single(
        self, output: Any, values: Any, output_sizes: Any = (), input_sizes: Any = (), opts: Any = None
    ) -> Any:
        request = OperationRequest(opts)
        check_alike("all_to_all", [output, values])
        size = self._group.world_size
        sending, receiving = _elements(input_sizes, values, size), _elements(output_sizes, output, size)
        even = not output_sizes and not input_sizes

        def job(seconds: float | None) -> None:
            self._all_to_all(values.detach(), output.detach(), sending, receiving, even, seconds)

        return self._issue(job, request, [output])

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        request = OperationRequest(opts)
        for tensors in (outputs, inputs):
            check_alike("all_to_all", tensors, count=self._group.world_size)
        check_alike("all_to_all", [*outputs, *inputs])
        sending, receiving = ([tensor.numel() for tensor in tensors] for tensors in (inputs, outputs))

        def job(seconds: float | None) -> None:
            everyone = _empty_for(outputs)
            self._all_to_all(_joined(inputs), everyone, sending, receiving, False, seconds)
            _spread(everyone, outputs)

        return self._issue(job, request, list(outputs))

    # -- messages: long ones inside the GPU if the ranks share it, others through the memory of the host ---------------

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        tensor = only(tensors, "send")
        if dst == self._group.rank:
            return self._owner._noted(self._owner._own.send(tensor, tag))
        if self._is_lent(tensor):
            self._owner._check(dst, tag)
            return self._move(tensor, lambda flat, seconds: self._group.isend(flat, dst, tag=tag, timeout=seconds))
        return self._send_by_host(tensor, dst, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        tensor = only(tensors, "recv")
        if src == self._group.rank:
            return self._owner._noted(self._owner._own.recv(tensor, tag))
        self._owner._check(src, tag)
        return self._receive(tensor, src, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        return self._receive(only(tensors, "recv"), None, tag)

    def _is_lent(self, tensor: Any) -> bool:
        """True if the ranks share the GPU, and the tensor is worth it."""
        return self._group._loans is not None and tensor.nbytes > LENT_FROM and tensor.is_contiguous()

    def _move(self, tensor: Any, begin: Callable[[Any, float | None], Any], src: int | None = -1) -> Any:
        """Sends or receives a tensor where it lies.

        Args:
            begin: Gets its elements in one dim.
            src: Whom it comes from; None for anyone, -1 if it is sent.
        """
        owner, behind = self._owner, _mark(tensor.device)
        outgoing, incoming = owner._lines
        lines = (outgoing, incoming) if src == -1 else (incoming, outgoing)

        def run() -> Any:
            with _on_own_stream(tensor.device, behind):
                return begin(_as_on_host(tensor).reshape(-1), owner._seconds)

        def finish(result: Any) -> int:
            return int(result.src) if src is None else src

        work = MessageWork(lines, run, [tensor], finish)
        lines[0].join(work)
        return owner._noted(work)

    def _send_by_host(self, tensor: Any, dst: int, tag: int) -> Any:
        """Sends a copy in the memory of the host."""
        owner = self._owner
        if tensor.nbytes <= SHORT or not _lies_plainly(tensor):  # torch's own copy of a short one is as quick
            return OPERATIONS["send"](owner, [tensor.detach().cpu()], dst, tag)  # shown already, as this tensor's
        owner._check(dst, tag)
        copy = _HostCopy(tensor, write=False)
        outgoing, incoming = owner._lines

        def begin() -> Any:
            copy.load()
            return owner._send(copy.host, dst, tag)

        def finish(_result: Any) -> int:
            copy.give_back()
            return -1

        work = MessageWork((outgoing, incoming), begin, [tensor], finish)
        outgoing.join(work)
        return owner._noted(work)

    def _receive(self, tensor: Any, src: int | None, tag: int) -> Any:
        if self._is_lent(tensor):
            receive = self._group.irecv
            return self._move(tensor, lambda flat, seconds: receive(flat, src, tag=tag, timeout=seconds), src)
        return self._receive_by_host(tensor, src, tag)

    def _receive_by_host(self, tensor: Any, src: int | None, tag: int) -> Any:
        owner, target = self._owner, tensor.detach()
        outgoing, incoming = owner._lines
        if _lies_plainly(target):
            copy = _HostCopy(target, write=True)
            memory: Any = copy.host

            def store() -> None:
                copy.store()
                copy.give_back()

        else:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            filled, behind = in_place(host), _mark(tensor.device)
            memory = filled.array

            def store() -> None:
                filled.restore()
                with _on_own_stream(target.device, behind):
                    target.copy_(host)

        def finish(result: Any) -> int:
            store()
            return src if src is not None else int(result.src)

        def begin() -> Any:
            return owner._recv(memory, src, tag)

        work = MessageWork((incoming, outgoing), begin, [tensor], finish)
        incoming.join(work)
        return owner._noted(work)

    # ------------------------------------------------------------------------------------------------------------------

    @property
    def _group(self) -> Any:
        return self._owner.group

    def _combining(self, request: OperationRequest, tensor: Any) -> Combining:
        return combining(request.op, tensor.dtype, self._group.world_size)

    def _issue(self, job: Job, request: OperationRequest, tensors: list[Any], results: list[Any] | None = None) -> Any:
        """Has the process group run a job, in its turn.

        Args:
            tensors: The tensors that it changes; the first one's device is that of all.
            results: Those that its work gives back, if these are others.
        """
        device = tensors[0].device
        if request.later:
            behind = _mark(device)

            def run(seconds: float | None) -> None:
                with _on_own_stream(device, behind):
                    job(seconds)

        else:
            stream, thread = torch.cuda.current_stream(device), threading.get_ident()

            def run(seconds: float | None) -> None:
                if threading.get_ident() == thread:
                    job(seconds)
                    return
                # Others were issued before it, so another thread runs it, while this one waits.
                with torch.cuda.stream(stream):
                    job(seconds)

        return self._owner._issue(run, request, tensors if results is None else results)

    def _all_reduce(self, tensor: Any, how: Combining, seconds: float | None) -> None:
        target = tensor.detach()
        _multiply(target, how)
        with _flattened(target, write=True) as flat:
            self._group.all_reduce(flat, how.name, timeout=seconds)
        _divide(target, how)

    def _all_reduce_sparse(self, tensor: Any, request: OperationRequest, seconds: float | None) -> None:
        """Through the memory of the host: how many entries there are is known by then only."""
        host = tensor.detach().cpu()
        all_reduce_sparse(self._group, host, request.op, seconds)
        with torch.no_grad():  # as on the CPU
            tensor.copy_(host)

    def _reduce_scatter(self, output: Any, values: Any, how: Combining, seconds: float | None) -> None:
        if how.factor is not None:
            values = (values * how.factor).to(values.dtype)
        with _flattened(output.detach(), write=True) as target:
            self._group.reduce_scatter(values.reshape(-1), how.name, target, timeout=seconds)
        _divide(output.detach(), how)

    def _all_gather_job(self, targets: Sequence[Any], tensor: Any) -> Job:
        check_alike("all_gather", targets, count=self._group.world_size)
        check_alike("all_gather", [tensor, *targets])
        counts = [target.numel() for target in targets]
        if counts[self._group.rank] != tensor.numel():
            raise UsageError(
                f"all_gather: this rank's tensor has {tensor.numel()} elements, but the output for it has "
                f"{counts[self._group.rank]}"
            )

        def job(seconds: float | None) -> None:
            everyone, apart = _memory_for(targets, tensor)
            mine = _movable(tensor).reshape(-1)
            rows = [mine.numel() * count // max(tensor.numel(), 1) for count in counts]
            uneven = len(set(counts)) > 1
            self._group.all_gather(mine, everyone, counts=rows if uneven else None, timeout=seconds)
            if apart:
                _spread(everyone, targets)

        return job

    def _all_to_all(
        self,
        values: Any,
        target: Any,
        sending: list[int],
        receiving: list[int],
        even: bool,
        seconds: float | None,
    ) -> None:
        sent, width = _movable(values).reshape(-1), _width(values)
        with _flattened(_movable(target), write=True) as got:
            if even:
                self._group.all_to_all(sent, got, timeout=seconds)
                return
            self._group.all_to_all(
                sent,
                got,
                send_counts=[count * width for count in sending],
                recv_counts=[count * width for count in receiving],
                timeout=seconds,
            )


# -- streams -----------------------------------------------------------------------------------------------------------


@functools.cache
def _own_stream(device: Any) -> Any:
    return torch.cuda.Stream(device)


def _mark(device: Any) -> Any:
    """A mark on the current stream; None if that is idle."""
    stream = torch.cuda.current_stream(device)
    if torch.cuda.is_current_stream_capturing():
        raise UsageError(
            "the current stream is being captured for a CUDA graph, which cannot hold a collective of Phalanx: other "
            "ranks take part in it when it runs (call it outside of the capture)"
        )
    return None if stream.query() else stream.record_event()


class _on_own_stream:  # noqa: N801 - reads as a statement
    """Runs what is inside on a stream of its own, behind a mark, and leaves when the stream has done it."""

    def __init__(self, device: Any, behind: Any) -> None:
        self._stream = _own_stream(device)
        self._behind = behind
        self._context = torch.cuda.stream(self._stream)

    def __enter__(self) -> None:
        self._context.__enter__()
        if self._behind is not None:
            self._stream.wait_event(self._behind)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.__exit__(kind, error, trace)
        if kind is None:
            while not self._stream.query():
                time.sleep(PAUSE)


# -- copies ------------------------------------------------------------------------------------------------------------


class _HostCopy:
    """Memory of the host for a tensor, behind what its stream had to do when this was made.

    It is copied by a copy engine, which never waits for the kernels of other processes. torch's own copy of a short
    tensor to the GPU does: it takes 274 µs if two processes copy, and this 36.
    """

    __slots__ = ("_array", "_copies", "give_back", "host")

    def __init__(self, tensor: Any, *, write: bool) -> None:
        self._array = device_array(_as_on_host(tensor).reshape(-1), write=write).array
        self._copies = host_copies(self._array.device)
        self.host, self.give_back = self._copies.lend(self._array.shape, self._array.dtype)

    def load(self) -> None:
        """Copies the tensor to the host."""
        self._expect(self._copies.load(self._array, host_address(self.host), Deadline(LONGEST)))

    def store(self) -> None:
        """Copies it back."""
        self._expect(self._copies.store(host_address(self.host), self._array, Deadline(LONGEST)))

    @staticmethod
    def _expect(copied: bool) -> None:
        if not copied:
            raise Timeout(f"a tensor on a GPU was not computed within {LONGEST:g} s", seconds=LONGEST)


def _lies_plainly(tensor: Any) -> bool:
    """True if the values of a tensor are what lies in its memory, in order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


# -- tensors -----------------------------------------------------------------------------------------------------------

_AS_BYTES = tuple(
    getattr(torch, name) for name in ("complex32", "float4_e2m1fn_x2", "float8_e8m0fnu") if hasattr(torch, name)
)
"""Dtypes that `Group` does not know: they are moved as bytes."""


def _movable(tensor: Any) -> Any:
    """A tensor that `Group` can move, on the same memory."""
    tensor = tensor.detach()
    return tensor.view(torch.uint8) if tensor.dtype in _AS_BYTES else tensor


def _as_on_host(tensor: Any) -> Any:
    """A tensor as a message through the host has it, on the same memory: the other rank may send or receive it so."""
    stand_in = OTHER_DTYPES.get(tensor.dtype, (None, 0))[0]
    is_other = stand_in is not None and stand_in.kind == "u"
    return tensor.detach().view(getattr(torch, stand_in.name)) if is_other else tensor.detach()


def _width(tensor: Any) -> int:
    return tensor.dtype.itemsize if tensor.dtype in _AS_BYTES else 1


@contextlib.contextmanager
def _flattened(tensor: Any, *, write: bool) -> Iterator[Any]:
    """The elements of a tensor in one dim, as the core passes them: ranks that call it by the fast path do the same.

    Args:
        write: True if they are changed.
    """
    flat = tensor.reshape(-1)
    yield flat
    if write and not tensor.is_contiguous():
        tensor.copy_(flat.reshape(tensor.shape))


def _joined(tensors: Sequence[Any]) -> Any:
    """The values of some tensors, one after another."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _in_a_row(tensors: Sequence[Any], other: Any) -> Any:
    """Tensors that lie one after another in memory, as one, such as the parts that `chunk` gives; None for all others.

    To join them takes a kernel, and while other processes use the GPU, a kernel waits for its time slice: longer than
    all else that a short operation does.

    Args:
        other: A tensor of the same operation; None if it lies in the same memory.
    """
    first = tensors[0].detach()
    memory, at = first.untyped_storage().data_ptr(), first.data_ptr()
    if other.untyped_storage().data_ptr() == memory:
        return None
    for tensor in tensors:
        is_plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        if not is_plain or tensor.data_ptr() != at or tensor.untyped_storage().data_ptr() != memory:
            return None
        at += tensor.numel() * tensor.element_size()
    return first.as_strided((sum(tensor.numel() for tensor in tensors),), (1,))


def _one(tensors: Sequence[Any], other: Any) -> Any:
    """The values of some tensors, one after another, which are only read; as for `_in_a_row`."""
    found = _in_a_row(tensors, other)
    return _joined(tensors) if found is None else found


def _memory_for(tensors: Sequence[Any], other: Any) -> tuple[Any, bool]:
    """Memory for the values of some tensors, one after another: their own if they lie so, else other, and True.

    Args:
        other: As for `_in_a_row`.
    """
    own = _in_a_row(tensors, other)
    return (_empty_for(tensors), True) if own is None else (_movable(own), False)


def _empty_for(tensors: Sequence[Any]) -> Any:
    """Memory for the values of some tensors, one after another, as `Group` can move it."""
    first = tensors[0]
    count = sum(tensor.numel() for tensor in tensors)
    return _movable(torch.empty(count, dtype=first.dtype, device=first.device))


def _spread(everyone: Any, tensors: Sequence[Any]) -> None:
    """Copies such values to the tensors."""
    everyone = everyone.view(tensors[0].dtype)
    for part, tensor in zip(everyone.split([tensor.numel() for tensor in tensors]), tensors, strict=True):
        tensor.detach().copy_(part.reshape(tensor.shape))


def _elements(rows: Sequence[int], tensor: Any, ranks: int) -> list[int]:
    """How many elements go to each rank, or come from it: torch counts along dim 0, and evenly if it says nothing.

    Raises:
        UsageError: They are not as many as the tensor has.
    """
    length = tensor.shape[0] if tensor.dim() else 1
    wanted = list(rows) or [length // ranks] * ranks
    if sum(wanted) != length or len(wanted) != ranks:
        raise UsageError(
            f"all_to_all: the split sizes {wanted} do not fit {ranks} ranks and dim 0 of a tensor of shape "
            f"{tuple(tensor.shape)}"
        )
    width = tensor.numel() // length if length else 0
    return [count * width for count in wanted]


def _multiply(tensor: Any, how: Combining) -> None:
    if how.factor is not None:
        tensor.mul_(how.factor)


def _divide(tensor: Any, how: Combining) -> None:
    if how.divisor != 1:
        tensor.div_(how.divisor, rounding_mode="trunc")
