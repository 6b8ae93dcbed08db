"""Collectives on lists of tensors: the core takes each tensor where it lies, and does what the general way does."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.torch_backend.support import together
from tests.torch_backend.test_fast_calls import (
    DTYPES,
    REDUCTIONS,
    WAYS,
    GeneralWay,
    bytes_of,
    default,
    end,
    meet,
    same_both_ways,
    values,
)

from phalanx.torch_backend.fast_calls import are_available

pytestmark = pytest.mark.skipif(
    not are_available(),
    reason="this torch does not say where a tensor's memory is, or there is no core: there are no fast calls",
)

Tensors = list[torch.Tensor]


def apart(size: int, count: int, dtype: torch.dtype = torch.float32) -> Tensors:
    return [torch.zeros(count, dtype=dtype) for _ in range(size)]


def cut(size: int, count: int, dtype: torch.dtype = torch.float32) -> Tensors:
    return list(torch.zeros(size * count, dtype=dtype).chunk(size))


def with_gaps(size: int, count: int, dtype: torch.dtype = torch.float32) -> Tensors:
    return [torch.zeros(2 * count, dtype=dtype)[::2] for _ in range(size)]


def filled(tensors: Tensors) -> Tensors:
    """The same list; its tensors tell of the rank and of their place in it."""
    for i, tensor in enumerate(tensors):
        tensor.copy_(values(3 * dist.get_rank() + i, tensor.dtype, tensor.numel()))
    return tensors


def gathered(targets: Tensors, later: bool = False) -> Tensors:
    end(dist.all_gather(targets, filled(apart(1, targets[0].numel(), targets[0].dtype))[0], async_op=later))
    return targets


def reduced(sources: Tensors, later: bool = False, op: Any = dist.ReduceOp.SUM) -> Tensors:
    out = torch.zeros_like(sources[0])
    end(dist.reduce_scatter(out, filled(sources), op, async_op=later))
    return [out, *sources]


def exchanged(targets: Tensors, sources: Tensors, later: bool = False) -> Tensors:
    end(dist.all_to_all(targets, filled(sources), async_op=later))
    return [*targets, *sources]


def gathered_at(root: int, targets: Tensors, later: bool = False) -> Tensors:
    mine = filled(apart(1, targets[0].numel(), targets[0].dtype))[0]
    end(dist.gather(mine, targets if dist.get_rank() == root else None, root, async_op=later))
    return targets


def scattered(root: int, sources: Tensors, later: bool = False) -> Tensors:
    out = torch.zeros_like(sources[0])
    end(dist.scatter(out, filled(sources) if dist.get_rank() == root else None, root, async_op=later))
    return [out]


Make = Callable[..., Tensors]
MAKERS: list[Make] = [apart, cut]


def calls(size: int, count: int, dtype: torch.dtype, later: bool) -> dict[str, Callable[[], Tensors]]:
    """One of each kind and each way to lie."""
    found: dict[str, Callable[[], Tensors]] = {}
    for make in MAKERS:
        name = make.__name__
        found[f"all_gather {name}"] = lambda make=make: gathered(make(size, count, dtype), later)
        found[f"gather {name}"] = lambda make=make: gathered_at(1, make(size, count, dtype), later)
        found[f"scatter {name}"] = lambda make=make: scattered(1, make(size, count, dtype), later)
        found[f"reduce_scatter {name}"] = lambda make=make: reduced(make(size, count, dtype), later)
    for target, source in itertools.product(MAKERS, MAKERS):
        found[f"all_to_all {target.__name__} {source.__name__}"] = lambda target=target, source=source: exchanged(
            target(size, count, dtype), source(size, count, dtype), later
        )
    return found


def test_they_take_the_fast_way() -> None:
    def body(rank: int) -> None:
        meet()
        general = GeneralWay()
        for count, later in itertools.product((3, 2 << 20), (False, True)):
            for name, call in calls(2, count, torch.float32, later).items():
                assert not general.takes(call), (name, count, later)

    together(2, body)


@WAYS
def test_every_dtype(env: dict[str, str]) -> None:
    def body(rank: int) -> None:
        meet()
        for dtype, count, later in itertools.product(DTYPES, (5, 0), (False, True)):
            for call in calls(2, count, dtype, later).values():
                same_both_ways(call)

    together(2, body, env=env, timeout=120.0)


def test_every_reduction() -> None:
    def body(rank: int) -> None:
        meet()
        for name, dtype in itertools.product(REDUCTIONS, (torch.int32, torch.float16, torch.float32, torch.bfloat16)):
            for make, later in itertools.product(MAKERS, (False, True)):
                op = getattr(dist.ReduceOp, name)
                same_both_ways(lambda make=make, later=later, op=op, dtype=dtype: reduced(make(2, 5, dtype), later, op))

    together(2, body)


@WAYS
@pytest.mark.parametrize("count", [7, (4 << 20) // 4 + 5], ids=["short", "long"])
def test_each_rank_has_its_list_as_it_likes(count: int, env: dict[str, str]) -> None:
    """One takes the fast way, another the general one, and a third has gaps: they do the same operations."""
    size = 3

    def body(rank: int) -> None:
        dist.barrier()
        makers = (apart, cut, with_gaps)
        for turn, later in itertools.product(range(size), (False, True)):
            make, other = makers[(rank + turn) % size], makers[(rank + 2 * turn) % size]
            default().fast_calls.closed = rank == turn
            everyone = [values(3 * source, torch.float32, count) for source in range(size)]
            assert all(map(torch.equal, gathered(make(size, count), later), everyone))
            if rank == turn:
                assert all(map(torch.equal, gathered_at(turn, make(size, count), later), everyone))
            else:
                gathered_at(turn, make(size, count), later)
            mine = [values(3 * source + rank, torch.float32, count) for source in range(size)]
            assert all(map(torch.equal, exchanged(make(size, count), other(size, count), later), mine))
            assert torch.equal(reduced(make(size, count), later)[0], torch.stack(mine).sum(0))
            part = scattered(turn, make(size, count), later)[0]
            assert torch.equal(part, values(3 * turn + rank, torch.float32, count))

    together(size, body, env=env, timeout=120.0)


def test_the_first_call_of_a_group_may_be_a_long_list() -> None:
    def body(rank: int) -> None:
        count = (4 << 20) // 4 + 1
        make = (apart, cut)[rank]
        everyone = [values(3 * source, torch.float32, count) for source in range(2)]
        assert all(map(torch.equal, gathered(make(2, count)), everyone))

    together(2, body)


def test_tensors_that_are_input_and_output() -> None:
    def body(rank: int) -> None:
        meet()

        def own_part() -> Tensors:
            targets = filled(apart(2, 4))
            dist.all_gather(targets, targets[rank])
            return targets

        def into_an_input(i: int) -> Tensors:
            sources = filled(apart(2, 4))
            dist.reduce_scatter(sources[i], sources)
            return sources

        def one_tensor_for_all() -> Tensors:
            one, out = filled(apart(1, 4))[0], torch.zeros(4)
            dist.reduce_scatter(out, [one, one])
            targets = apart(2, 4)
            dist.all_to_all(targets, [one, one])
            return [one, out, *targets]

        def in_place() -> Tensors:
            tensors = filled(apart(2, 4))
            dist.all_to_all(tensors, tensors)
            return tensors

        def overlapping() -> Tensors:
            memory = torch.arange(12.0) + rank
            targets = apart(2, 4)
            dist.all_to_all(targets, [memory[:4], memory[2:6]])
            dist.all_gather([memory[4:8], memory[8:]], memory[2:6])
            return [memory, *targets]

        for call in (
            own_part,
            partial(into_an_input, rank),
            partial(into_an_input, 1 - rank),
            one_tensor_for_all,
            in_place,
            overlapping,
        ):
            same_both_ways(call)

    together(2, body)


def test_lists_of_several_sizes() -> None:
    """Whether all ranks have tensors of one size is asked of all."""

    def body(rank: int) -> None:
        meet()

        def uneven(extra: int, later: bool) -> Tensors:
            sources = filled([torch.zeros(2), torch.zeros(2 + extra * rank)])
            targets = [torch.zeros(2), torch.zeros(2 + extra * rank)]
            end(dist.all_to_all(targets, sources, async_op=later))
            return targets

        def nothing_for_some(later: bool) -> Tensors:
            sources, targets = filled([torch.zeros(3 * rank), torch.zeros(4)]), [torch.zeros(3 * rank), torch.zeros(4)]
            if rank == 0:
                targets[1] = torch.zeros(3)
            else:
                sources[0], targets[0] = filled([torch.zeros(3)])[0], torch.zeros(4)
            end(dist.all_to_all(targets, sources, async_op=later))
            return targets

        general = GeneralWay()
        for later in (False, True):
            for extra in (0, 1, 5):
                assert not general.takes(lambda extra=extra, later=later: uneven(extra, later))
                same_both_ways(lambda extra=extra, later=later: uneven(extra, later))
            same_both_ways(lambda later=later: nothing_for_some(later))

    together(2, body)


def test_a_list_that_is_changed_while_the_operation_is_under_way() -> None:
    def body(rank: int) -> None:
        meet()
        for _ in range(20):
            sources, out = filled(apart(2, 1000)), torch.zeros(1000)
            expected = sum(values(3 * source + rank, torch.float32, 1000) for source in range(2))
            work = dist.reduce_scatter(out, sources, async_op=True)
            sources.clear()
            work.wait()
            assert torch.equal(out, expected)

    together(2, body)


def test_wrong_lists_are_refused_as_before() -> None:
    def body(rank: int) -> None:
        meet()
        one, two = torch.ones(2), apart(2, 2)
        for call in (
            lambda: dist.all_gather(apart(3, 2), one),
            lambda: dist.all_gather(apart(2, 3), one),
            lambda: dist.reduce_scatter(torch.ones(3), two),
            lambda: dist.reduce_scatter(one, apart(1, 2)),
            lambda: dist.all_to_all(two, apart(3, 2)),
            lambda: dist.all_to_all(apart(1, 2), two),
        ):
            with pytest.raises(ValueError, match="all_gather|reduce_scatter|all_to_all"):
                call()
            same_both_ways(call)
        assert [bytes_of(tensor) for tensor in gathered(two)] == [
            bytes_of(values(3 * source, torch.float32, 2)) for source in range(2)
        ]

    together(2, body)
