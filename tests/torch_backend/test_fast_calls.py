"""Simple calls take the core's way, and what they do is what the general way does."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from tests.torch_backend.support import all_gather_single, reduce_scatter_single, together
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.torch_backend import fast_calls
from phalanx.torch_backend.collective_work import PreparedWork
from phalanx.torch_backend.fast_calls import are_available
from phalanx.torch_backend.work import FinishedWork

pytestmark = pytest.mark.skipif(
    not are_available(),
    reason="this torch does not say where a tensor's memory is, or there is no core: there are no fast calls",
)

OVER_TCP = {"PHALANX_TRANSPORT": "tcp"}
WAYS = pytest.mark.parametrize("env", [{}, OVER_TCP], ids=["memory", "tcp"])

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
OTHERS = [torch.complex64, torch.complex128, torch.complex32, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES = [*INTEGERS, *FLOATS, *OTHERS]
REDUCTIONS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]

Call = Callable[[], Any]


def default() -> Any:
    """The process group of all ranks."""
    return c10d._get_default_group()


def meet() -> None:
    """Waits until two ranks have all connections and their shared memory, so that messages go the fast way."""
    rank = dist.get_rank()
    for _ in range(1000):
        ready = torch.tensor([0])
        if dist.get_world_size() == 2:
            work = dist.isend(torch.ones(1), 1 - rank)
            ready[0] = type(work) is FinishedWork
            dist.recv(torch.ones(1), 1 - rank)
            work.wait()
        dist.all_reduce(ready, dist.ReduceOp.MIN)
        if ready:
            return
    raise AssertionError("no message has gone the fast way")


class GeneralWay:
    """Counts the calls of a process group that take the general way."""

    def __init__(self) -> None:
        group = default()
        self.calls = 0
        for name in ("_issue", "_noted"):
            setattr(group, name, self._counting(getattr(group, name)))

    def _counting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return method(*args, **kwargs)

        return call

    def takes(self, call: Call) -> bool:
        """Whether this one does."""
        before = self.calls
        call()
        return self.calls > before


def by_the_general_way(call: Call) -> Any:
    """The call's result, without the core."""
    fast = default().fast_calls
    fast.closed = True
    try:
        return call()
    finally:
        fast.closed = False


def outcome(call: Call) -> Any:
    """What came of a call: the bytes of the tensors that it returned, or the error."""
    try:
        return [bytes_of(tensor) for tensor in call()]
    except Exception as error:
        return type(error).__name__, str(error).partition("\n")[0]


def bytes_of(tensor: torch.Tensor) -> list[int]:
    """The tensor's memory."""
    found: list[int] = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).tolist()
    return found


def same_both_ways(call: Call) -> None:
    """The call does the same by both ways."""
    fast, general = outcome(call), by_the_general_way(lambda: outcome(call))
    assert fast == general


def values(rank: int, dtype: torch.dtype, count: int = 6) -> torch.Tensor:
    """Small numbers, other ones on every rank; halves where there are such."""
    numbers = (torch.arange(count) * 7 + rank * 3) % 9 + 1
    if dtype == torch.bool:
        return numbers % 2 == 0
    if dtype.is_complex:
        return torch.complex(numbers / 2, numbers / -4).to(dtype)
    return (numbers / 2).to(dtype) if dtype.is_floating_point else numbers.to(dtype)


def options_for(kind: Any, *, later: bool) -> Any:
    """Options as torch's functions make them."""
    options = kind()
    options.asyncOp = later
    return options


# -- which way ---------------------------------------------------------------------------------------------------------


def simple_calls(rank: int, *, later: bool) -> dict[str, Call]:
    """A call of each kind that the core does."""
    one, both = torch.ones(4), torch.ones(8)

    def ended(work: Any) -> None:
        if later:
            work.wait()

    return {
        "all_reduce": lambda: ended(dist.all_reduce(one, async_op=later)),
        "broadcast": lambda: ended(dist.broadcast(one, 0, async_op=later)),
        "reduce": lambda: ended(dist.reduce(one, 0, async_op=later)),
        "all_gather": lambda: ended(all_gather_single(both, one, async_op=later)),
        "reduce_scatter": lambda: ended(reduce_scatter_single(one, both, async_op=later)),
        "all_to_all": lambda: ended(dist.all_to_all_single(both, torch.ones(8), async_op=later)),
        "barrier": lambda: ended(dist.barrier(async_op=later)),
    }


def test_simple_calls_take_the_fast_way() -> None:
    def body(rank: int) -> None:
        meet()
        general = GeneralWay()
        for later in (False, True):
            for name, call in simple_calls(rank, later=later).items():
                assert not general.takes(call), (name, later)
        parameter = nn.Parameter(torch.ones(2))
        bfloat = torch.ones(3, dtype=torch.bfloat16)
        assert not general.takes(lambda: dist.all_reduce(parameter))
        assert not general.takes(lambda: dist.all_reduce(torch.ones((), dtype=torch.int64)))
        assert not general.takes(lambda: dist.all_reduce(torch.ones(3, 4)[1:]))
        assert not general.takes(lambda: dist.broadcast(bfloat, 1))
        first, second = ((dist.send, dist.recv), (dist.recv, dist.send))[rank]
        assert not general.takes(lambda: first(torch.ones(4), 1 - rank))
        assert not general.takes(lambda: second(torch.ones(4), 1 - rank))

    together(2, body)


def test_calls_that_are_not_simple_take_the_general_way() -> None:
    def body(rank: int) -> None:
        meet()
        general = GeneralWay()
        x = torch.ones(4, 4)
        limited = options_for(c10d.AllreduceOptions, later=False)
        limited.timeout = timedelta(seconds=5)
        from_first = options_for(c10d.BroadcastOptions, later=False)
        calls: dict[str, Call] = {
            "strides": lambda: dist.all_reduce(x.t()),
            "steps": lambda: dist.all_reduce(torch.ones(8)[::2]),
            "negative": lambda: dist.all_reduce(torch._neg_view(torch.ones(4))),
            "conjugate": lambda: default().broadcast([torch.ones(4, dtype=torch.complex64).conj()], from_first),
            "conjugate of halves": lambda: default().broadcast(
                [torch.ones(4, dtype=torch.complex32).conj()], from_first
            ),
            "bfloat16": lambda: dist.all_reduce(torch.ones(4, dtype=torch.bfloat16)),
            "mean of integers": lambda: dist.all_reduce(torch.ones(4, dtype=torch.int32), dist.ReduceOp.AVG),
            "sparse": lambda: dist.all_reduce(torch.eye(2).to_sparse()),
            "premultiplied": lambda: dist.all_reduce(torch.ones(2), dist._make_nccl_premul_sum(2.0)),
            "timeout": lambda: default().allreduce([torch.ones(2)], limited),
            "split sizes": lambda: dist.all_to_all_single(torch.ones(2), torch.ones(2), [1, 1], [1, 1]),
            "no options": lambda: default().allreduce([torch.ones(2)]).wait(),
        }
        for name, call in calls.items():
            assert general.takes(call), name
        default().set_timeout(timedelta(seconds=7))
        assert general.takes(lambda: dist.all_reduce(x))
        default().set_timeout(timedelta(seconds=20))  # as the group was made with
        assert not general.takes(lambda: dist.all_reduce(x))

    together(2, body)


class Watch(TorchDispatchMode):  # type: ignore[misc]  # torch is not typed here
    """Counts what torch does with process groups."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


def test_what_watches_sees_each_call_and_no_other_ones() -> None:
    def body(rank: int) -> None:
        meet()
        x = torch.ones(4)
        for later in (False, True):
            calls = simple_calls(rank, later=later)
            for name, call in calls.items():
                call()
                with Watch() as watch:
                    call()
                assert watch.seen == 1, (name, later)
                call()
                assert watch.seen == 1, (name, later)
        dist.all_reduce(x)
        with torch.profiler.profile() as profiler:
            dist.all_reduce(x)
            dist.all_reduce(x, async_op=True).wait()
        assert sum("allreduce_" in event.name for event in profiler.events()) >= 2

    together(2, body)


# -- the same results --------------------------------------------------------------------------------------------------


def end(work: Any) -> None:
    """Waits for an operation that the call has not waited for."""
    if work is not None:
        work.wait()


def all_reduced(dtype: torch.dtype, op: Any, later: bool) -> list[torch.Tensor]:
    x = values(dist.get_rank(), dtype)
    end(dist.all_reduce(x, op, async_op=later))
    return [x]


def reduced(dtype: torch.dtype, op: Any, later: bool) -> list[torch.Tensor]:
    x = values(dist.get_rank(), dtype)
    end(dist.reduce(x, 1, op, async_op=later))
    return [x]


def reduced_and_scattered(dtype: torch.dtype, op: Any, later: bool) -> list[torch.Tensor]:
    x, part = values(dist.get_rank(), dtype), torch.zeros(3, dtype=dtype)
    end(reduce_scatter_single(part, x, op, async_op=later))
    return [x, part]


@WAYS
def test_every_reduction_of_every_dtype(env: dict[str, str]) -> None:
    def body(rank: int) -> None:
        meet()
        for dtype, name, later in itertools.product(DTYPES, REDUCTIONS, (False, True)):
            for call in (all_reduced, reduced, reduced_and_scattered):
                same_both_ways(partial(call, dtype, getattr(dist.ReduceOp, name), later))

    together(2, body, env=env, timeout=120.0)


def test_the_sum_of_small_floats_is_not_that_of_their_bits() -> None:
    def body(rank: int) -> None:
        meet()
        for later in (False, True):
            x = torch.full((4,), 1.5, dtype=torch.bfloat16)
            end(dist.all_reduce(x, async_op=later))
            assert x.tolist() == [3.0] * 4
            mean = torch.tensor([1, -1, 4]) * (rank + 1)
            end(dist.all_reduce(mean, dist.ReduceOp.AVG, async_op=later))
            assert mean.tolist() == [1, -1, 6]

    together(2, body)


def shaped(rank: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return values(rank, dtype, torch.Size(shape).numel()).reshape(shape)


def broadcast(dtype: torch.dtype, shape: tuple[int, ...], later: bool) -> list[torch.Tensor]:
    x = shaped(dist.get_rank(), dtype, shape)
    end(dist.broadcast(x, 1, async_op=later))
    return [x]


def gathered(dtype: torch.dtype, shape: tuple[int, ...], later: bool) -> list[torch.Tensor]:
    out = torch.zeros((2, *shape), dtype=dtype)
    end(all_gather_single(out, shaped(dist.get_rank(), dtype, shape), async_op=later))
    return [out]


def exchanged(dtype: torch.dtype, shape: tuple[int, ...], later: bool) -> list[torch.Tensor]:
    x = shaped(dist.get_rank(), dtype, shape)
    out = torch.zeros_like(x)
    end(dist.all_to_all_single(out, x, async_op=later))
    return [out]


def sent(dtype: torch.dtype, shape: tuple[int, ...], later: bool) -> list[torch.Tensor]:
    other = 1 - dist.get_rank()
    x = shaped(1 - other, dtype, shape)
    out = torch.zeros_like(x)
    works = [dist.isend(x, other)]
    if later:
        works.append(dist.irecv(out, other))
    else:
        dist.recv(out, other)
    for work in works:
        end(work)
    assert bytes_of(out) == bytes_of(shaped(other, dtype, shape))
    return [out]


@WAYS
def test_every_dtype_and_shape_that_is_moved(env: dict[str, str]) -> None:
    def body(rank: int) -> None:
        meet()
        for dtype, shape, later in itertools.product(DTYPES, [(6,), (2, 3), (), (0,), (4, 0)], (False, True)):
            for call in (broadcast, gathered, exchanged, sent):
                same_both_ways(partial(call, dtype, shape, later))

    together(2, body, env=env, timeout=120.0)


def odd(rank: int) -> dict[str, torch.Tensor]:
    """Tensors that are not as most are, of four numbers."""
    x = torch.arange(4.0) + rank
    twelve = torch.arange(12.0) + rank
    return {
        "offset": twelve[5:9],
        "steps": twelve[::3],
        "columns": twelve.reshape(3, 4)[:2, :2],
        "transposed": x.reshape(2, 2).t(),
        "channels last": x.reshape(1, 2, 1, 2).to(memory_format=torch.channels_last),
        "odd strides of length one": torch.as_strided(x, (1, 4), (77, 1)),
        "negative": torch._neg_view(x.clone()),
        "imaginary of conjugate": torch.complex(x, -x).conj().imag,
        "leaf": x.clone().requires_grad_(),
        "parameter": nn.Parameter(x.clone()),
        "buffer": nn.Buffer(x.clone()) if hasattr(nn, "Buffer") else x.clone(),
        "inference": infer(x),
        "subclass": x.clone().as_subclass(Subclass),
        "shared": x.clone().share_memory_(),
        "from numpy": torch.from_numpy(x.numpy().copy()),
    }


class Subclass(torch.Tensor):
    """One that does as its base."""


def infer(x: torch.Tensor) -> torch.Tensor:
    """A tensor that was made while nothing was recorded for a backward pass."""
    with torch.inference_mode():
        return x.clone()


def test_odd_tensors() -> None:
    def body(rank: int) -> None:
        meet()
        for name in odd(0):
            both = odd(0)[name].detach().clone() + odd(1)[name].detach().clone()
            for later in (False, True):
                x = odd(rank)[name]
                end(dist.all_reduce(x, async_op=later))
                assert torch.equal(x.detach(), both), (name, later)
                out, x = torch.zeros(8), odd(rank)[name]
                end(all_gather_single(out, x.detach().reshape(4) if x.dim() != 1 else x, async_op=later))
                assert torch.equal(out, torch.cat([odd(0)[name].detach().reshape(4), odd(1)[name].detach().reshape(4)]))
        expanded, out = torch.tensor([1.0 + rank]).expand(4), torch.zeros(8)
        all_gather_single(out, expanded)
        assert out.tolist() == [1.0] * 4 + [2.0] * 4

    together(2, body)


def test_one_rank_may_take_the_fast_way_and_another_the_general_one() -> None:
    def body(rank: int) -> None:
        meet()
        default().fast_calls.closed = rank == 0
        x, out = torch.ones(4) + rank, torch.zeros(8)
        dist.all_reduce(x)
        all_gather_single(out, torch.full((4,), float(rank)))
        dist.broadcast(x, 1)
        dist.barrier()
        dist.all_reduce(x, async_op=True).wait()
        assert x.tolist() == [6.0] * 4
        assert out.tolist() == [0.0] * 4 + [1.0] * 4

    together(2, body)


@WAYS
def test_memory_that_is_input_and_output(env: dict[str, str]) -> None:
    def body(rank: int) -> None:
        meet()

        def gathered_in_place() -> Any:
            whole = torch.arange(8.0) + 10 * rank
            all_gather_single(whole, whole[4 * rank : 4 * rank + 4])
            return [whole]

        def gathered_from_another_place() -> Any:
            whole = torch.arange(8.0) + 10 * rank
            all_gather_single(whole, whole[2:6])
            return [whole]

        def scattered_in_place() -> Any:
            whole = torch.arange(8.0) + 10 * rank
            part = whole[4 * rank : 4 * rank + 4]
            reduce_scatter_single(part, whole)
            return [part]

        def scattered_to_another_place() -> Any:
            whole = torch.arange(8.0) + 10 * rank
            reduce_scatter_single(whole[2:6], whole)
            return [whole[2:6]]

        def exchanged_in_place() -> Any:
            x = torch.arange(8.0) + 10 * rank
            dist.all_to_all_single(x, x)
            return [x]

        def exchanged_with_its_neighbour() -> Any:
            x = torch.arange(9.0) + 10 * rank
            dist.all_to_all_single(x[1:], x[:8])
            return [x]

        for call in (
            gathered_in_place,
            gathered_from_another_place,
            scattered_in_place,
            scattered_to_another_place,
            exchanged_in_place,
            exchanged_with_its_neighbour,
        ):
            same_both_ways(call)
        expected = torch.cat([torch.arange(4.0), torch.arange(4.0, 8.0) + 10])
        assert outcome(gathered_in_place) == [bytes_of(expected)]

    together(2, body, env=env)


def test_what_is_wrong_is_said_as_before() -> None:
    def body(rank: int) -> None:
        meet()
        pair = [torch.ones(2), torch.ones(2)]
        calls: list[Call] = [
            lambda: all_gather_single(torch.ones(7), torch.ones(4)),
            lambda: all_gather_single(torch.ones(8, dtype=torch.float64), torch.ones(4)),
            lambda: reduce_scatter_single(torch.ones(4), torch.ones(9)),
            lambda: dist.all_to_all_single(torch.ones(8), torch.ones(4)),
            lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3)),
            lambda: dist.all_to_all_single(torch.ones(()), torch.ones(())),
            lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND),
            lambda: dist.broadcast(torch.ones(2), 7),
            lambda: dist.send(torch.ones(2), 7),
            lambda: default().send([torch.ones(2)], 7, 0),
            lambda: default().recv([torch.ones(2)], 7, 0),
            lambda: default().send([torch.ones(2)], 1 - rank, -1),
            lambda: default().allreduce(pair, options_for(c10d.AllreduceOptions, later=False)),
            lambda: default().allreduce([], options_for(c10d.AllreduceOptions, later=False)),
            lambda: default().allreduce([None], options_for(c10d.AllreduceOptions, later=False)),
            lambda: default().broadcast([torch.ones(2)], options_for(c10d.AllreduceOptions, later=False)),
        ]
        for number, call in enumerate(calls):
            fast, general = outcome(call), by_the_general_way(lambda call=call: outcome(call))
            assert isinstance(fast, tuple), number
            assert fast == general, number
        x = torch.ones(2)
        dist.all_reduce(x)
        assert x.tolist() == [2.0, 2.0]

    together(2, body)


def test_autograd_sees_as_much_as_with_gloo() -> None:
    def body(rank: int) -> list[Any]:
        dist.all_reduce(torch.ones(1))
        seen: list[Any] = []
        for later in (False, True):
            leaf = torch.ones(2, requires_grad=True)
            saved = leaf * leaf
            end(dist.all_reduce(leaf, async_op=later))
            seen += [leaf.tolist(), leaf._version, leaf.is_leaf, leaf.grad_fn is None]
            saved.sum().backward()
            assert leaf.grad is not None
            seen.append(leaf.grad.tolist())
            inner = torch.ones(2, requires_grad=True) * 3
            dist.broadcast(inner, 0)
            seen += [inner._version, type(inner.grad_fn).__name__, inner.requires_grad]
        return seen

    assert together(2, body) == together(2, body, backend="gloo")


# -- handles -----------------------------------------------------------------------------------------------------------


def test_a_handle_that_the_program_keeps() -> None:
    def body(rank: int) -> None:
        meet()
        x = torch.ones(4)
        options = options_for(c10d.AllreduceOptions, later=False)
        works = [default().allreduce([x], options)]
        if rank == 0:
            works.append(dist.isend(x, 1))
        else:
            dist.recv(x, 0)
        for work in works:
            assert type(work) is FinishedWork
            assert work.wait()
            assert work.wait(timedelta(seconds=1))
            assert work.is_completed()
            assert work.is_success()
            assert work.exception() is None
            assert work.result()[0] is x
            assert work.get_future() is work.get_future()
            assert work.get_future().wait()[0] is x
            assert "FinishedWork" in repr(work)
            with pytest.raises(RuntimeError, match="source rank"):
                work.source_rank()
            with pytest.raises(TypeError, match="pickle"):
                pickle.dumps(work)
        later = dist.all_reduce(x, async_op=True)
        assert type(later) is PreparedWork
        later.wait()
        with pytest.raises(TypeError, match="pickle"):
            pickle.dumps(later)

    together(2, body)


class Counted:
    """A function that a program has put in the place of another: it has no code of its own."""

    def __init__(self, function: Call) -> None:
        self.function = function
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.function(*args, **kwargs)


def test_functions_that_a_program_has_replaced_before_it_begins() -> None:
    def body(rank: int) -> tuple[int, list[Any]]:
        c10d.all_reduce = dist.all_reduce = counted = Counted(c10d.all_reduce)
        kept: list[Any] = []

        def broadcast(tensor: torch.Tensor, src: int) -> None:
            options = c10d.BroadcastOptions()
            options.asyncOp, options.rootRank = False, src
            kept.append(default().broadcast([tensor], options))

        def isend(tensor: torch.Tensor, dst: Any = None, group: Any = None, tag: int = 0, group_dst: int = 0) -> Any:
            kept.append(default().send([tensor], group_dst, tag))
            return kept[-1]

        c10d.broadcast, c10d.isend = broadcast, isend
        fast_calls._access.cache_clear()  # as if the program had done so before there was a group
        group = default()
        group._use(group.group)
        for i in range(5):
            x = torch.full((3,), float(rank + i))
            dist.all_reduce(x)
            assert x.tolist() == [1.0 + 2 * i] * 3
        x = torch.full((2,), float(rank))
        broadcast(x, 1)
        y = torch.zeros(2)
        for _ in range(3):
            if rank == 0:
                dist.send(x, 1)
            else:
                dist.recv(y, 0)
        return counted.calls, [[each.tolist() for each in work.result()] for work in kept]

    assert together(2, body) == [(5, [[[1.0, 1.0]]] * 4), (5, [[[1.0, 1.0]]])]


def test_a_handle_that_goes_to_c_plus_plus() -> None:
    def body(rank: int) -> None:
        meet()
        for later in (False, True):
            x = torch.ones(4)
            work = default().allreduce([x], options_for(c10d.AllreduceOptions, later=later))
            torch._C._distributed_c10d._register_work(x, work)
            del work
            torch.ops._c10d_functional.wait_tensor(x)
            assert x.tolist() == [2.0] * 4
        # C++ calls the group's method, and keeps what it returns.
        y = torch.ops._c10d_functional.all_reduce(torch.ones(4), "sum", default().group_name)
        assert torch.ops._c10d_functional.wait_tensor(y).tolist() == [2.0] * 4
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, torch.ones(2), 1 - rank), dist.P2POp(dist.irecv, x := torch.zeros(2), 1 - rank)]
        )
        for work in works:
            work.wait()
        assert x.tolist() == [1.0, 1.0]

    together(2, body)


def test_data_parallel_with_a_hook_that_communicates() -> None:
    def body(rank: int) -> list[float]:
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))

        def hook(state: Any, bucket: Any) -> Any:
            work = default().allreduce([bucket.buffer().div_(2)], options_for(c10d.AllreduceOptions, later=state.pop()))
            return work.get_future().then(lambda done: done.value()[0])

        hook.__annotations__.clear()  # torch wants its own classes there, or nothing
        ways = [False, True, False, True]
        model.register_comm_hook(ways, hook)
        for _ in range(3):
            model.zero_grad()
            model(torch.full((1, 4), 1.0 + rank)).sum().backward()
        assert len(ways) == 1
        assert model.module.weight.grad is not None
        found: list[float] = model.module.weight.grad.reshape(-1).tolist()
        return found

    assert together(2, body) == [[1.5] * 8] * 2


# -- order -------------------------------------------------------------------------------------------------------------


@WAYS
def test_calls_that_wait_and_calls_that_do_not_keep_their_order(env: dict[str, str]) -> None:
    def body(rank: int) -> None:
        meet()
        for count in (2, 1 << 16):
            x = torch.ones(count, dtype=torch.float64) * (rank + 1)
            works = []
            for step in range(30):
                if step % 3 == 2:
                    dist.all_reduce(x, dist.ReduceOp.AVG)
                elif step % 3 == 1:
                    works.append(dist.broadcast(x, step % 2, async_op=True))
                else:
                    works.append(dist.all_reduce(x, async_op=True))
            for work in reversed(works):
                work.wait()
            assert x.unique().tolist() == [3.0 * 2.0**9]

    together(2, body, env=env)


def test_threads_and_the_groups_that_they_share() -> None:
    def body(rank: int) -> None:
        meet()
        shared = [dist.new_group([0, 1]) for _ in range(3)]
        failures: list[BaseException] = []

        def train(group: Any) -> None:
            try:
                for step in range(100):
                    x = torch.full((3,), float(rank + step))
                    work = dist.all_reduce(x, group=group, async_op=step % 3 == 0)
                    if work is not None:
                        work.wait()
                    assert x.tolist() == [2.0 * step + 1.0] * 3
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=train, args=(group,)) for group in shared]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures

    together(2, body)


def test_a_call_while_another_thread_is_in_one() -> None:
    def body(rank: int) -> None:
        meet()
        x, y, go = torch.ones(1), torch.ones(1), torch.zeros(1)
        if rank == 0:
            before = default()._get_sequence_number_for_group()
            thread = threading.Thread(target=lambda: dist.all_reduce(x))
            thread.start()
            while default()._get_sequence_number_for_group() == before:
                time.sleep(0.001)
            dist.send(go, 1)  # until then the other rank does not come
            dist.all_reduce(y, dist.ReduceOp.PRODUCT)
            thread.join()
        else:
            dist.recv(go, 0)
            dist.all_reduce(x)
            dist.all_reduce(y, dist.ReduceOp.PRODUCT)
        assert (x.item(), y.item()) == (2.0, 1.0)

    together(2, body)


@WAYS
def test_a_receive_that_was_interrupted_takes_no_message(env: dict[str, str]) -> None:
    def body(rank: int) -> list[float]:
        meet()
        found = []
        for after in (0.01, 0.2):
            for source in (1, None):
                x = torch.zeros(3)
                if rank == 0:
                    threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT)).start()
                    with pytest.raises(KeyboardInterrupt):
                        dist.recv(x, source, tag=4)
                else:
                    time.sleep(after + 0.3)  # what came in that moment would be torn, and the channel with it
                dist.barrier()
                if rank == 0:
                    y = torch.zeros(3)
                    dist.recv(y, source, tag=4)
                    found.append((x + y)[0].item())
                    assert not x.any()
                else:
                    dist.send(torch.full((3,), after), 0, tag=4)
        return found

    found, _ = together(2, body, env=env, seconds=5.0)
    assert found == pytest.approx([0.01, 0.01, 0.2, 0.2])


def test_operations_as_one() -> None:
    def body(rank: int) -> None:
        meet()
        group, general = default(), GeneralWay()
        x, y = torch.ones(2), torch.ones(3)
        options = options_for(c10d.AllreduceOptions, later=True)
        group._start_coalescing(torch.device("cpu"))
        assert general.takes(lambda: group.allreduce([x], options))
        assert general.takes(lambda: group.allreduce([y], options_for(c10d.AllreduceOptions, later=False)))
        work = group._end_coalescing(torch.device("cpu"))
        work.wait()
        assert work.is_completed()
        assert len(work.result()) == 2
        assert (x.tolist(), y.tolist()) == ([2.0] * 2, [2.0] * 3)
        assert not general.takes(lambda: dist.all_reduce(x))

    together(2, body)


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("later", [False, True])
def test_a_rank_that_does_not_come(later: bool) -> None:
    def body(rank: int, later: bool) -> None:
        meet()
        group = dist.new_group([0, 1], timeout=timedelta(seconds=0.4))
        dist.all_reduce(torch.ones(1), group=group)
        if rank == 0:
            with pytest.raises(dist.DistBackendError, match=r"(?s) Timed out .* missing: 1"):
                end(dist.all_reduce(torch.ones(1), group=group, async_op=later))
            with pytest.raises(dist.DistBackendError):  # it is broken for good
                dist.all_reduce(torch.ones(1), group=group)
        dist.barrier()

    together(2, body, later)


def test_a_group_that_was_aborted_or_closed() -> None:
    def body(rank: int) -> None:
        meet()
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(1), group=group)
        if rank == 0:
            group.abort()
        else:
            for later in (False, True):
                with pytest.raises(dist.DistNetworkError, match=r"rank 0 .*aborted"):
                    end(dist.all_reduce(torch.ones(1), group=group, async_op=later))
        dist.barrier()
        world = default()
        dist.destroy_process_group()
        for later in (False, True):
            with pytest.raises((dist.DistBackendError, dist.DistNetworkError)):
                world.allreduce([torch.ones(1)], options_for(c10d.AllreduceOptions, later=later)).wait()

    together(2, body)


def test_a_forked_child_has_no_part_in_it() -> None:
    def body(rank: int) -> None:
        meet()
        if rank == 0:
            child = os.fork()
            if child == 0:
                try:
                    dist.all_reduce(torch.ones(1))
                except RuntimeError:
                    os._exit(7)
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x.item() == 2.0

    together(2, body)


def test_a_world_of_one() -> None:
    def body(rank: int) -> None:
        for later in (False, True):
            x, out = torch.ones(2), torch.zeros(2)
            for call in (
                lambda x=x, later=later: dist.all_reduce(x, async_op=later),
                lambda x=x, later=later: dist.broadcast(x, 0, async_op=later),
                lambda x=x, out=out, later=later: all_gather_single(out, x, async_op=later),
                lambda later=later: dist.barrier(async_op=later),
            ):
                work = call()
                if later:
                    work.wait()
            assert (x.tolist(), out.tolist()) == ([1.0, 1.0], [1.0, 1.0])

    together(1, body)


def test_a_compiled_program() -> None:
    def body(rank: int) -> None:
        meet()

        def step(x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            dist.all_reduce(y)  # a part of the graph
            reduce_again(y)
            return y + 1

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def reduce_again(y: torch.Tensor) -> None:
            work = dist.all_reduce(y, async_op=True)
            dist.all_reduce(y)
            work.wait()

        compiled = torch.compile(step, backend="eager")
        for _ in range(2):
            assert compiled(torch.ones(2)).tolist() == [17.0, 17.0]

    together(2, body)
