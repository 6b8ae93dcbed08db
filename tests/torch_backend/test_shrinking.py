"""`torch.distributed.shrink_group` on Phalanx: the survivors go on, in the default group or in another."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.torch_backend.support import together
from torch import nn

pytestmark = pytest.mark.skipif(not hasattr(dist, "shrink_group"), reason="this torch has no shrink_group")


def lose(rank: int, victim: int) -> None:
    """Kills a rank in an all_reduce of the others."""
    dist.all_reduce(torch.ones(1))
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match=f"rank {victim} is lost"):
        reduce_for_ever()


def reduce_for_ever() -> None:
    while True:
        dist.all_reduce(torch.ones(1000))


@pytest.mark.parametrize("victim", [0, 2])
def test_the_default_group(victim: int) -> None:
    def body(rank: int) -> Any:
        lose(rank, victim)
        group = dist.shrink_group([victim])
        assert dist.group.WORLD is group
        x = torch.full((5,), float(rank))
        dist.all_reduce(x)
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, rank)
        pair = dist.new_group([0, 1])
        y = torch.ones(1)
        if dist.get_rank() < 2:
            dist.all_reduce(y, group=pair)
        dist.barrier()
        return dist.get_rank(), dist.get_world_size(), x[0].item(), gathered, y.item()

    results = together(4, body, may_die=[victim])
    left = [rank for rank in range(4) if rank != victim]
    for number, rank in enumerate(left):
        assert results[rank] == (number, 3, float(sum(left)), left, 2.0 if number < 2 else 1.0)


def test_training_goes_on_under_data_parallel() -> None:
    def body(rank: int) -> Any:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        wrapped = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            optimizer.zero_grad()
            wrapped(torch.ones(2, 4)).sum().backward()
            optimizer.step()

        step()
        lose(rank, 1)
        dist.shrink_group([1])
        wrapped = nn.parallel.DistributedDataParallel(model)
        step()
        return model.weight.detach().sum().item()

    results = together(3, body, may_die=[1])
    assert results[0] == results[2]


def test_a_sub_group() -> None:
    def body(rank: int) -> Any:
        group = dist.new_group([1, 2, 3])
        if rank == 0:
            return None
        dist.all_reduce(torch.ones(1), group=group)
        if rank == 3:
            return None  # it lives, and is left out
        smaller = dist.shrink_group([2], group=group)
        x = torch.ones(1)
        dist.all_reduce(x, group=smaller)
        return dist.get_world_size(smaller), x.item()

    assert together(4, body) == [None, (2, 2.0), (2, 2.0), None]


def test_two_shrinks_and_two_kills() -> None:
    def body(rank: int) -> Any:
        lose(rank, 3)
        dist.shrink_group([3])
        lose(dist.get_rank(), 0)
        dist.shrink_group([0])
        x = torch.ones(1)
        dist.all_reduce(x)
        return dist.get_rank(), x.item()

    results = together(4, body, may_die=[0, 3])
    assert (results[1], results[2]) == ((0, 2.0), (1, 2.0))


def test_living_ranks_are_left_out() -> None:
    """Several at once, one of which closes its group meanwhile; then one more, from the group that was made first."""

    def body(rank: int) -> Any:
        dist.barrier()
        if rank in (0, 2):
            if rank == 0:
                dist.destroy_process_group()
            return None
        first = dist.shrink_group([0, 2], shrink_flags=1)
        x = torch.full((1,), float(rank))
        dist.all_reduce(x, group=first)
        if rank == 4:
            return x.item()
        second = dist.shrink_group([2], group=first)
        y = torch.full((1,), float(rank))
        dist.all_reduce(y)
        return x.item(), y.item(), second.size(), dist.get_rank()

    results = together(5, body)
    assert results == [None, (8.0, 4.0, 2, 0), None, (8.0, 4.0, 2, 1), 8.0]


def test_a_sub_group_of_one_is_left_and_the_default_group_works() -> None:
    def body(rank: int) -> Any:
        pair = dist.new_group([0, 1])
        if rank == 0:
            alone = dist.shrink_group([1], group=pair)
            x = torch.full((1,), 7.0)
            dist.all_reduce(x, group=alone)
            assert (alone.size(), x.item()) == (1, 7.0)
        dist.barrier()
        if rank == 2:
            return None
        smaller = dist.shrink_group([2])
        y = torch.full((1,), float(rank))
        dist.all_reduce(y, group=smaller)
        return smaller.size(), y.item()

    assert together(3, body) == [(2, 1.0), (2, 1.0), None]


def test_torch_refuses_what_makes_no_sense() -> None:
    def body(rank: int) -> Any:
        for wrong, kind in (([], ValueError), ([7], ValueError), ([0, 1], ValueError), ([rank], RuntimeError)):
            with pytest.raises(kind):
                dist.shrink_group(wrong)
        dist.barrier()
        return True

    assert all(together(2, body))


def test_reconfigure_gives_the_group_other_members() -> None:
    """As torch 2.14's `_reconfigure` calls it; the method itself is there for every torch."""

    def body(rank: int) -> Any:
        group = dist.group.WORLD
        assert group is not None
        handles: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(handles, group.get_reconfigure_handle())
        lose(rank, 1)
        options = SimpleNamespace(uuid=7, handles=[handles[2], handles[0], handles[3]], timeout=timedelta(seconds=30))
        group.reconfigure(options).wait()
        x = torch.full((3,), float(rank))
        dist.all_reduce(x)
        reordered = SimpleNamespace(uuid=8, handles=set(options.handles), timeout=None)
        group.reconfigure(reordered).wait()
        dist.barrier()
        return dist.get_rank(), dist.get_world_size(), x[0].item()

    results = together(4, body, may_die=[1])
    assert {results[rank][1:] for rank in (0, 2, 3)} == {(3, 5.0)}
    assert {results[rank][0] for rank in (0, 2, 3)} == {0, 1, 2}


@pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="this torch cannot reconfigure")
def test_torch_reconfigures_a_group_that_began_alone_and_lost_a_rank() -> None:
    def body(rank: int) -> Any:
        store = dist.group.WORLD.get_group_store()
        dist.destroy_process_group()
        limit = timedelta(seconds=20)
        dist.init_process_group("phalanx", store=store, rank=rank, world_size=3, timeout=limit, enable_reconfigure=True)
        assert dist._supports_reconfigure()
        found = [dist.get_world_size()]
        for uuid, members in ((1 << 62, [0, 1, 2]), ((1 << 62) + 1, [2, 0])):
            store.set(f"{uuid} {rank}", dist._get_reconfigure_handle())
            handles = [store.get(f"{uuid} {member}").decode() for member in members]
            if rank not in members:
                os.kill(os.getpid(), signal.SIGKILL)
            assert dist._reconfigure(uuid=uuid, handles=handles, timeout=limit).wait()
            x = torch.full((2,), float(rank))
            dist.all_reduce(x)
            found += [dist.get_rank(), dist.get_world_size(), x[0].item()]
        return found

    results = together(3, body, may_die=[1])
    assert results[0] == [1, 0, 3, 3.0, 1, 2, 2.0]
    assert results[2] == [1, 2, 3, 3.0, 0, 2, 2.0]


def test_a_group_that_is_not_among_the_new_members_is_told() -> None:
    def body(rank: int) -> Any:
        with pytest.raises(ValueError, match="not among"):
            dist.group.WORLD.reconfigure(SimpleNamespace(uuid=1, handles=["phalanx:other"], timeout=None))
        return True

    assert all(together(2, body))
