"""Every operation, on every dtype, against what NumPy says."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.torch_backend.support import (
    TORCH,
    all_gather_single,
    functional_all_gather,
    functional_reduce_scatter,
    reduce_scatter_single,
    together,
)

SIZES = (2, 4)
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
MOVED = [*INTEGERS, *FLOATS, *COMPLEX, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]


def values(rank: int, dtype: torch.dtype, shape: tuple[int, ...] = (3, 2)) -> torch.Tensor:
    """Small whole numbers, other ones on every rank: exact in every dtype."""
    count = 1
    for length in shape:
        count *= length
    numbers = (torch.arange(count) * (rank + 2) + rank) % 5 + 1
    if dtype == torch.bool:
        return (numbers % 2 == 0).reshape(shape)
    return (
        numbers.to(torch.float32).to(dtype).reshape(shape) if dtype.itemsize == 1 else numbers.to(dtype).reshape(shape)
    )


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit, and of one dtype and shape."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    view = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if found.dtype.is_complex:
        found, expected = torch.view_as_real(found), torch.view_as_real(expected)
    kind = view[found.dtype.itemsize]
    assert torch.equal(found.contiguous().view(kind), expected.contiguous().view(kind)), (found, expected)


OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": operator.add,
    "PRODUCT": operator.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": operator.and_,
    "BOR": operator.or_,
    "BXOR": operator.xor,
}


def combined(op: str, size: int, dtype: torch.dtype) -> torch.Tensor:
    # torch itself cannot add all of its dtypes; 64-bit numbers and what wraps around are the same by way of int64.
    wide = torch.float64 if dtype.is_floating_point else torch.complex128 if dtype.is_complex else torch.int64
    parts = [values(rank, dtype).to(wide) for rank in range(size)]
    return reduce(OPS[op], parts).to(dtype)


@pytest.mark.parametrize("size", SIZES)
def test_reductions(size: int) -> None:
    def body(rank: int) -> None:
        for dtype in [*INTEGERS, *FLOATS, *COMPLEX]:
            for op in OPS:
                if (op.startswith("B") and dtype not in INTEGERS) or (op in ("MIN", "MAX") and dtype in COMPLEX):
                    continue
                if op == "PRODUCT" and dtype in COMPLEX:
                    continue  # torch refuses it
                expected = combined(op, size, dtype)
                reduction = getattr(dist.ReduceOp, op)
                tensor = values(rank, dtype)
                dist.all_reduce(tensor, reduction)
                same(tensor, expected)
                tensor = values(rank, dtype)
                dist.reduce(tensor, size - 1, reduction)
                same(tensor, expected if rank == size - 1 else values(rank, dtype))
                mine = torch.empty_like(tensor)
                dist.reduce_scatter(mine, [values(rank, dtype)] * size, reduction)
                same(mine, expected)
                reduce_scatter_single(mine, torch.cat([values(rank, dtype)] * size), reduction)
                same(mine, expected)

    together(size, body)


@pytest.mark.parametrize("size", SIZES)
def test_truth_values(size: int) -> None:
    def body(rank: int) -> None:
        parts = [values(other, torch.bool) for other in range(size)]
        for op, expected in {
            "SUM": reduce(torch.logical_or, parts),
            "MAX": reduce(torch.logical_or, parts),
            "BOR": reduce(torch.logical_or, parts),
            "PRODUCT": reduce(torch.logical_and, parts),
            "MIN": reduce(torch.logical_and, parts),
            "BAND": reduce(torch.logical_and, parts),
            "BXOR": reduce(torch.logical_xor, parts),
        }.items():
            tensor = values(rank, torch.bool)
            dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
            same(tensor, expected)

    together(size, body)


def test_means_and_weighted_sums() -> None:
    def body(rank: int) -> None:
        for dtype in [*FLOATS, torch.complex64]:
            tensor = torch.full((4,), float(2 * rank), dtype=dtype)
            dist.all_reduce(tensor, dist.ReduceOp.AVG)
            same(tensor, torch.full((4,), 1.0, dtype=dtype))
        whole = torch.tensor([rank + 1, -rank - 1])
        dist.all_reduce(whole, dist.ReduceOp.AVG)
        assert whole.tolist() == [1, -1]  # an integer has no half
        part = torch.empty(1)
        reduce_scatter_single(part, torch.tensor([1.0 + rank, 3.0 + rank]), dist.ReduceOp.AVG)
        assert part.item() == (1.5 if rank == 0 else 3.5)
        weighted = torch._C._distributed_c10d._make_nccl_premul_sum(0.5)
        tensor = torch.full((3,), float(rank + 1))
        dist.all_reduce(tensor, weighted)
        assert tensor.tolist() == [1.5] * 3
        tensor = torch.full((3,), float(rank + 1))
        dist.reduce(tensor, 0, weighted)
        assert tensor.tolist() == [1.5 if rank == 0 else 2.0] * 3
        reduce_scatter_single(part, torch.tensor([2.0, 4.0]), weighted)
        assert part.item() == (2.0 if rank == 0 else 4.0)

    together(2, body)


@pytest.mark.parametrize("size", SIZES)
def test_what_is_moved(size: int) -> None:
    def body(rank: int) -> None:
        for dtype in MOVED:
            everyone = [values(other, dtype) for other in range(size)]
            mine = everyone[rank].clone()
            tensor = mine.clone()
            dist.broadcast(tensor, size - 1)
            same(tensor, everyone[-1])

            outputs = [torch.empty_like(mine) for _ in range(size)]
            dist.all_gather(outputs, mine)
            for found, expected in zip(outputs, everyone, strict=True):
                same(found, expected)
            stacked = torch.empty((3 * size, 2), dtype=dtype)
            all_gather_single(stacked, mine)
            for other in range(size):
                same(stacked[3 * other : 3 * other + 3], everyone[other])

            outputs = [torch.empty_like(mine) for _ in range(size)]
            dist.gather(mine, outputs if rank == 1 else None, 1)
            if rank == 1:
                for found, expected in zip(outputs, everyone, strict=True):
                    same(found, expected)
            tensor = torch.empty_like(mine)
            dist.scatter(tensor, everyone if rank == 1 else None, 1)
            same(tensor, mine)

            outputs = [torch.empty_like(mine) for _ in range(size)]
            dist.all_to_all(outputs, everyone)
            for found in outputs:
                same(found, mine)
            single = torch.empty((3 * size, 2), dtype=dtype)
            dist.all_to_all_single(single, stacked)
            for other in range(size):
                same(single[3 * other : 3 * other + 3], mine)

            tensor = torch.empty_like(mine)
            work = dist.isend(mine, (rank + 1) % size)
            dist.recv(tensor, (rank - 1) % size)
            work.wait()
            same(tensor, everyone[(rank - 1) % size])

    together(size, body)


@pytest.mark.parametrize("size", SIZES)
def test_sizes_that_differ(size: int) -> None:
    def body(rank: int) -> None:
        outputs = [torch.empty(other + 1, 2) for other in range(size)]
        dist.all_gather(outputs, torch.full((rank + 1, 2), float(rank)))
        for other, found in enumerate(outputs):
            assert found.tolist() == [[float(other)] * 2] * (other + 1)

        parts = [torch.full((other + 1,), float(rank)) for other in range(size)]
        mine = torch.empty(rank + 1)
        dist.reduce_scatter(mine, parts)
        assert mine.tolist() == [float(sum(range(size)))] * (rank + 1)

        # Rank i sends i + j rows to rank j.
        sent = [rank + other for other in range(size)]
        rows = torch.cat([torch.full((rank + other, 2), 10.0 * rank + other) for other in range(size)])
        found = torch.empty(sum(sent), 2)
        dist.all_to_all_single(found, rows, sent, sent)
        expected = torch.cat([torch.full((rank + other, 2), 10.0 * other + rank) for other in range(size)])
        same(found, expected)
        outputs = [torch.empty(rank + other) for other in range(size)]
        dist.all_to_all(outputs, [torch.full((rank + other,), 10.0 * rank + other) for other in range(size)])
        for other, tensor in enumerate(outputs):
            assert tensor.tolist() == [10.0 * other + rank] * (rank + other)

    together(size, body)


def test_memory_of_every_kind() -> None:
    def body(rank: int) -> None:
        transposed = torch.full((3, 4), float(rank + 1)).t()
        dist.all_reduce(transposed)
        assert transposed.tolist() == [[3.0] * 3] * 4
        strided = torch.zeros(8)
        dist.broadcast(strided[::2] if rank else torch.ones(4), 0)
        assert strided.tolist() == ([1.0, 0.0] * 4 if rank else [0.0] * 8)
        negative = torch.full((2,), 1j * (rank + 1), dtype=torch.complex64).conj().imag
        dist.all_reduce(negative)
        assert negative.tolist() == [-3.0, -3.0]
        output = torch.zeros(2, 4).t()
        all_gather_single(output, torch.full((2, 2), float(rank)))
        assert output.tolist() == [[0.0, 0.0]] * 2 + [[1.0, 1.0]] * 2
        leaf = torch.full((2,), float(rank), requires_grad=True)
        dist.all_reduce(leaf)
        assert leaf.tolist() == [1.0, 1.0]
        for empty in (torch.empty(0), torch.empty(0, 3, dtype=torch.bfloat16)):
            dist.all_reduce(empty)
            dist.broadcast(empty, 1)
            dist.all_gather([torch.empty_like(empty)] * 2, empty)
            dist.all_to_all_single(torch.empty_like(empty), empty)
        scalar = torch.tensor(float(rank + 1))
        dist.all_reduce(scalar)
        assert scalar.item() == 3.0
        outputs = [torch.tensor(0.0), torch.tensor(0.0)]
        dist.all_gather(outputs, scalar)
        assert [tensor.item() for tensor in outputs] == [3.0, 3.0]
        # `Tensor.numpy()` would have taken this from them for good.
        tensor = torch.ones(4)
        dist.all_reduce(tensor)
        tensor.resize_(400)

    together(2, body)


def test_sparse_tensors() -> None:
    def body(rank: int) -> None:
        tensor = torch.sparse_coo_tensor([[rank, 2]], [[1.0, 2.0], [3.0, 4.0]], (4, 2))
        dist.all_reduce(tensor)
        assert tensor.to_dense().tolist() == [[1.0, 2.0], [1.0, 2.0], [6.0, 8.0], [0.0, 0.0]]

    together(2, body)


def test_many_at_once() -> None:
    def body(rank: int) -> None:
        group = dist.distributed_c10d._get_default_group()
        tensors = [torch.full((n,), float(rank + 1), dtype=kind) for n in (1, 3) for kind in FLOATS]
        group.allreduce_coalesced(tensors).wait()
        for tensor in tensors:
            assert tensor.tolist() == [3.0] * tensor.numel()
        with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
            parts = [torch.ones(2), torch.ones(3)]
            for part in parts:
                dist.all_reduce(part)
        manager.wait()
        assert [part.tolist() for part in parts] == [[2.0] * 2, [2.0] * 3]
        for device in (None, torch.device("cpu")):
            outputs = [torch.empty(2), torch.empty(4)]
            with dist.distributed_c10d._coalescing_manager(group, device):
                for output in outputs:
                    all_gather_single(output, torch.full((output.numel() // 2,), float(rank)))
            assert [output.tolist() for output in outputs] == [[0.0, 1.0], [0.0, 0.0, 1.0, 1.0]]
            outputs = [torch.empty(1), torch.empty(2)]
            with dist.distributed_c10d._coalescing_manager(group, device):
                for output in outputs:
                    reduce_scatter_single(output, torch.arange(2.0 * output.numel()))
            assert [output.tolist() for output in outputs] == [[2.0 * rank], [4.0 * rank, 4.0 * rank + 2]]
        with dist.distributed_c10d._coalescing_manager(group, torch.device("cpu"), async_ops=True) as manager:
            got = torch.zeros(2)
            dist.isend(torch.full((2,), float(rank)), 1 - rank)
            dist.irecv(got, 1 - rank)
        manager.wait()
        assert got.tolist() == [1.0 - rank] * 2
        lists = [[torch.empty(2), torch.empty(1)] for _ in range(2)]
        group.allgather_coalesced(lists, [torch.full((2,), float(rank)), torch.full((1,), float(rank))]).wait()
        assert [[tensor.tolist() for tensor in row] for row in lists] == [[[0.0] * 2, [0.0]], [[1.0] * 2, [1.0]]]

    together(2, body)


def test_messages() -> None:
    def body(rank: int) -> None:
        big = torch.full((1 << 20,), float(rank))
        got = torch.empty(1 << 20)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, big, 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)]
        ):
            work.wait()
        assert got.unique().tolist() == [1.0 - rank]
        if rank == 0:
            first, second = torch.empty(1), torch.empty(2)
            by_tag = dist.irecv(second, 1, tag=7)
            dist.recv(first, 1, tag=3)
            by_tag.wait()
            assert (first.tolist(), second.tolist()) == ([3.0], [7.0, 7.0])
            assert dist.recv(first) == 1
            work = dist.irecv(first)
            work.wait()
            assert work._source_rank() == 1
        else:
            dist.send(torch.full((2,), 7.0), 0, tag=7)
            dist.send(torch.full((1,), 3.0), 0, tag=3)
            dist.send(torch.ones(1), 0)
            dist.send(torch.ones(1), 0)
        got = torch.zeros(2)  # to oneself, in both orders
        work = dist.irecv(got, rank)
        dist.isend(torch.full((2,), 5.0), rank).wait()
        work.wait()
        dist.isend(torch.full((2,), 6.0), rank, tag=1)
        other = torch.zeros(2)
        dist.irecv(other, rank, tag=1).wait()
        assert (got.tolist(), other.tolist(), work._source_rank()) == ([5.0] * 2, [6.0] * 2, rank)

    together(2, body)


def test_more_messages_than_there_is_room_for() -> None:
    def body(rank: int) -> None:
        works = [dist.isend(torch.full((count,), float(count)), 1 - rank) for count in [1, 100, 4000] * 100]
        for count in [1, 100, 4000] * 100:
            got = torch.empty(count)
            dist.recv(got, 1 - rank)
            assert got.unique().tolist() == [float(count)]
        for work in works:
            work.wait()

    together(2, body)


def test_objects() -> None:
    def body(rank: int) -> None:
        everyone: list[Any] = [None] * 2
        dist.all_gather_object(everyone, {"rank": rank, "text": "x" * (1000 * rank)})
        assert [one["rank"] for one in everyone] == [0, 1]
        several = [rank, "a"] if rank == 1 else [None, None]
        dist.broadcast_object_list(several, 1)
        assert several == [1, "a"]
        gathered: list[Any] = [None] * 2
        dist.gather_object(rank, gathered if rank == 0 else None, 0)
        assert rank != 0 or gathered == [0, 1]
        part: list[Any] = [None]
        dist.scatter_object_list(part, ["for 0", "for 1"] if rank == 0 else None, 0)
        assert part == [f"for {rank}"]
        if rank == 0:
            dist.send_object_list([1, {"a": 2}], 1)
        else:
            received: list[Any] = [None, None]
            dist.recv_object_list(received, 0)
            assert received == [1, {"a": 2}]

    together(2, body)


def test_functional_collectives() -> None:
    def body(rank: int) -> None:
        import torch.distributed._functional_collectives as functional

        group = dist.group.WORLD
        assert functional.all_reduce(torch.ones(2), "sum", group).tolist() == [2.0, 2.0]
        assert functional.all_reduce(torch.full((2,), float(rank)), "avg", group).tolist() == [0.5, 0.5]
        assert functional_all_gather(torch.full((1,), float(rank)), 0, group).tolist() == [0.0, 1.0]
        assert functional_reduce_scatter(torch.arange(2.0), "sum", 0, group).tolist() == [2.0 * rank]
        uneven = functional.all_to_all_single(
            torch.arange(3.0) + 10 * rank, [1, 1] if rank == 0 else [2, 2], [1, 2], group
        )
        assert uneven.tolist() == ([0.0, 10.0] if rank == 0 else [1.0, 2.0, 11.0, 12.0])
        assert functional.broadcast(torch.full((1,), float(rank)), 1, group).tolist() == [1.0]
        for found in functional.all_reduce_coalesced([torch.ones(1), torch.ones(2)], "sum", group):
            assert set(found.tolist()) == {2.0}
        # What compiled programs call, which C++ cannot hand to a group written in Python.
        name = group.group_name
        out = torch.empty(2)
        torch.ops._c10d_functional.all_gather_into_tensor_out(torch.full((1,), float(rank)), 2, name, out=out)
        assert torch.ops._c10d_functional.wait_tensor(out).tolist() == [0.0, 1.0]
        if TORCH >= (2, 10):
            out = torch.empty(1)
            torch.ops._c10d_functional.reduce_scatter_tensor_out(torch.arange(2.0), "sum", 2, name, out=out)
            assert torch.ops._c10d_functional.wait_tensor(out).tolist() == [2.0 * rank]

    together(2, body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["apart", "cut from one"])
def test_lists_of_long_tensors(how: str, dtype: torch.dtype) -> None:
    """They go in slices, or where they are."""
    size, count = 3, (2 << 20) // 4 * 2 + 7

    def made() -> list[torch.Tensor]:
        if how == "apart":
            return [torch.zeros(count, dtype=dtype) for _ in range(size)]
        return list(torch.zeros(size * count, dtype=dtype).chunk(size))

    def body(rank: int) -> None:
        mine = torch.arange(count).remainder(50).add(rank).to(dtype)
        everyone = made()
        dist.all_gather(everyone, mine)
        for source, found in enumerate(everyone):
            assert found.equal(mine - rank + source)
        inputs, outputs = made(), made()
        for target, tensor in enumerate(inputs):
            tensor.copy_(mine + 10 * target)
        dist.all_to_all(outputs, inputs)
        for source, found in enumerate(outputs):
            assert found.equal(mine - rank + source + 10 * rank)
        kept = [tensor.clone() for tensor in inputs]
        total = torch.empty(count, dtype=dtype)
        dist.reduce_scatter(total, inputs)
        assert total.equal(sum(mine - rank + source + 10 * rank for source in range(size)))
        assert all(before.equal(after) for before, after in zip(kept, inputs, strict=True))
        gathered = made() if rank == 1 else None
        dist.gather(mine, gathered, 1)
        for source, found in enumerate(gathered or []):
            assert found.equal(mine - rank + source)

    together(size, body)


def test_lists_of_which_only_some_ranks_have_equal_parts() -> None:
    """Rank 0 cannot know from its own tensors that rank 1 sends itself more."""

    def body(rank: int) -> None:
        inputs = [torch.full((2,), 1.0 + rank), torch.full((2 + rank,), 5.0 + rank)]
        outputs = [torch.empty(2), torch.empty(2 + rank)]
        dist.all_to_all(outputs, inputs)
        assert [tensor.tolist() for tensor in outputs] == (
            [[1.0, 1.0], [2.0, 2.0]] if rank == 0 else [[5.0, 5.0], [6.0, 6.0, 6.0]]
        )

    together(2, body)


def test_where_the_program_makes_its_tensors_does_not_matter() -> None:
    """Memory that an operation needs for itself is the host's, also if new tensors go elsewhere."""

    def body(rank: int) -> None:
        group: Any = dist.group.WORLD  # torch's own functions may hide from it where new tensors go
        gaps, halves = torch.arange(12.0)[::2], torch.ones(0, dtype=torch.bfloat16)
        average, entries = torch.full((6,), rank, dtype=torch.bfloat16), torch.eye(3).to_sparse()
        mean = dist.AllreduceOptions()
        mean.reduceOp = dist.ReduceOp.AVG
        torch.set_default_device("meta")
        for tensor in (gaps, halves, entries):
            group.allreduce([tensor]).wait()
        group.allreduce([average], mean).wait()
        group.broadcast([gaps]).wait()
        work = group.send([gaps], 1, 0) if rank == 0 else group.recv([gaps], 0, 0)
        work.wait()
        torch.set_default_device(None)
        same(gaps, torch.arange(12.0)[::2] * 2)
        same(average, torch.full((6,), 0.5, dtype=torch.bfloat16))
        same(entries.to_dense(), torch.eye(3) * 2)

    together(2, body)


@pytest.mark.parametrize("later", [False, True])
def test_what_autograd_has_saved_is_not_changed_unnoticed(later: bool) -> None:
    """torch's own backends fill the tensors of a list by an operation of torch, which autograd counts."""

    def body(rank: int) -> None:
        x, parts = torch.full((3,), 5.0), [torch.ones(3) for _ in range(2)]
        calls: list[Callable[[Any], Any]] = [
            lambda outputs: dist.all_gather(outputs, x, async_op=later),
            lambda outputs: dist.all_to_all(outputs, parts, async_op=later),
            lambda outputs: dist.gather(x, outputs if rank == 0 else None, 0, async_op=later),
            lambda outputs: dist.reduce_scatter(outputs[1], parts, async_op=later),
        ]
        for i, call in enumerate(calls):
            outputs = [torch.ones(3) for _ in range(2)]
            weights = torch.ones(3, requires_grad=True)
            loss = (weights * outputs[1]).sum()  # saves the second one
            work = call(outputs)
            if later:
                work.wait()
            if i == 2 and rank == 1:  # nothing was written there
                loss.backward()
                continue
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        with torch.inference_mode():
            dist.all_gather([torch.ones(3) for _ in range(2)], x)

    together(2, body)
