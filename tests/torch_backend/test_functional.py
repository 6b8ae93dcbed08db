"""The functional collectives: what compiled programs and DTensor call, by way of C++."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from tests.torch_backend.support import together
from torch.distributed.device_mesh import init_device_mesh

C10D = torch._C._distributed_c10d
pytestmark = pytest.mark.filterwarnings("ignore")  # torch has new names for some of them


def test_means_of_integers_and_lists_with_empty_tensors() -> None:
    def body(rank: int) -> None:
        ops: Any = torch.ops._c10d_functional
        C10D._register_process_group("another name", dist.group.WORLD)
        inputs = [torch.full((i, i), float(rank * i)) for i in range(5)]
        for operator in (ops.all_reduce_coalesced, ops.all_reduce_coalesced_):
            copies = [tensor.clone() for tensor in inputs]
            for i, output in enumerate(operator(copies, "avg", "another name")):
                assert ops.wait_tensor(output).eq(1.5 * i).all()
        mean = ops.reduce_scatter_tensor(torch.arange(4), "avg", 4, "another name")
        assert ops.wait_tensor(mean).tolist() == [rank]
        means = ops.reduce_scatter_tensor_coalesced([torch.arange(4) * i for i in range(3)], "avg", 4, "another name")
        assert [ops.wait_tensor(tensor).tolist() for tensor in means] == [[0], [rank], [2 * rank]]
        C10D._unregister_process_group("another name")

    together(4, body)


def test_a_result_waits_when_it_is_looked_at() -> None:
    def body(rank: int) -> None:
        before = C10D._get_work_registry_size()
        result = functional.all_reduce(torch.full((3, 3), float(rank)), "avg", dist.group.WORLD)
        assert isinstance(result, functional.AsyncCollectiveTensor)
        assert not result.completed
        assert C10D._get_work_registry_size() == before + 1
        view = result.view(9)
        assert view[4].item() == 0.5
        assert result.eq(0.5).all()
        assert result.completed
        del result, view
        gc.collect()
        assert C10D._get_work_registry_size() == before

    together(2, body)


def test_parts_of_any_size_also_none_to_all() -> None:
    def body(rank: int) -> None:
        sizes = torch.randint(0, 4, (4, 4), generator=torch.Generator().manual_seed(3)).tolist()
        sending, receiving = sizes[rank], [row[rank] for row in sizes]
        mine = torch.full((sum(sending), 2), float(rank))
        found = functional.all_to_all_single(mine, receiving, sending, dist.group.WORLD)
        assert found[:, 1].tolist() == [float(other) for other, count in enumerate(receiving) for _ in range(count)]

    together(4, body)


def test_along_each_axis_of_a_mesh() -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for axis, other in (("dp", (rank + 2) % 4), ("tp", rank ^ 1)):
            swapped = functional.permute_tensor(torch.tensor([float(rank), 7.0]), [1, 0], mesh[axis])
            assert swapped.tolist() == [float(other), 7.0]
            assert functional.all_reduce(torch.tensor([float(rank)]), "sum", mesh[axis]).item() == rank + other
            assert functional.all_gather_tensor(torch.tensor([rank]), 0, mesh[axis]).tolist() == sorted([rank, other])

    together(4, body)


def test_from_another_thread() -> None:
    def body(rank: int) -> None:
        found: list[float] = []
        thread = threading.Thread(
            target=lambda: found.append(functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD).item())
        )
        thread.start()
        thread.join(10)
        assert found == [2.0]

    together(2, body)


UNWAITED = """
import sys, torch, torch.distributed as dist
dist.init_process_group("phalanx", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
torch.ops._c10d_functional.all_reduce(torch.ones(100_000), "sum", dist.group.WORLD.group_name)
dist.all_reduce(torch.ones(100_000), async_op=True)
dist.barrier(async_op=True)
if "destroy" in sys.argv:
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("end", ["destroy", "just end"])
def test_a_program_may_end_without_having_waited(end: str, tmp_path: Any) -> None:
    command = [sys.executable, "-c", UNWAITED, str(tmp_path / "store")]
    ranks = [subprocess.Popen([*command, str(rank), end], stderr=subprocess.PIPE, text=True) for rank in range(2)]
    try:
        words = [rank.communicate(timeout=60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], words
