"""How groups are made, and what is left of them."""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import threading
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.lateness import bound
from tests.ports import free_port
from tests.torch_backend.support import TORCH, together

from phalanx.testing import run_ranks
from phalanx.transports.waker import _spare


def total(group: dist.ProcessGroup | None = None) -> float:
    tensor = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def test_who() -> None:
    def body(rank: int) -> None:
        group = dist.distributed_c10d._get_default_group()
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, 2, "phalanx")
        assert (group.rank(), group.size(), group.name()) == (rank, 2, "phalanx")
        assert (group.group_name, group.group_desc) == ("0", "default_pg")
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        assert group._device_types == [torch.device(each) for each in devices]
        assert group._get_backend(torch.device("cpu")) is group
        with pytest.raises(RuntimeError, match="no backend for xpu"):
            group._get_backend(torch.device("xpu"))
        before = group._get_sequence_number_for_group()
        dist.barrier()
        assert group._get_sequence_number_for_group() == before + 1
        group.get_group_store().set(f"key{rank}", "value")
        dist.barrier(device_ids=[0])
        assert group.get_group_store().get(f"key{1 - rank}") == b"value"

    together(2, body)


def test_memory_of_the_group() -> None:
    def body(rank: int) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            group = dist.new_group([0, 1])
            assert group.supports_tensor_alloc(torch.device("cpu"))
            assert not group.supports_tensor_alloc(torch.device("meta"))
            tensor = group.allocate_tensor(1000, dtype=dtype, device=torch.device("cpu"))
            assert (tensor.dtype, tensor.shape) == (dtype, (1000,))
            tensor.fill_(rank + 1)
            dist.all_reduce(tensor, group=group)
            assert tensor.float().eq(3).all()
            assert group.allocate_tensor(0, dtype=dtype, device=torch.device("cpu")).numel() == 0

    together(2, body)


def test_sub_groups() -> None:
    def body(rank: int) -> None:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        mine = pairs[rank // 2]
        assert total(mine) == (3.0 if rank < 2 else 7.0)
        assert dist.get_process_group_ranks(mine) == ([0, 1] if rank < 2 else [2, 3])
        odd = dist.new_group([1, 3], use_local_synchronization=True)
        if rank in (1, 3):
            assert total(odd) == 6.0
            tensor = torch.tensor([float(rank)])
            dist.broadcast(tensor, 3, group=odd)
            assert tensor.item() == 3.0
            dist.destroy_process_group(odd)
        alone = [dist.new_group([other]) for other in range(4)][rank]
        assert total(alone) == rank + 1
        again = dist.new_group([0, 1, 2, 3])
        assert total(again) == total() == 10.0
        by_node, _ = dist.new_subgroups(2)
        assert total(by_node) == (3.0 if rank < 2 else 7.0)

    together(4, body)


def test_one_beside_another_backend() -> None:
    def body(rank: int) -> None:
        mine = dist.new_group([0, 1], backend="phalanx")
        assert total(mine) == total() == 3.0

    together(2, body, backend="gloo")

    def the_other_way(rank: int) -> None:
        other = dist.new_group([0, 1], backend="gloo")
        assert total(other) == total() == 3.0

    together(2, the_other_way)


@pytest.mark.skipif(TORCH < (2, 11), reason="the stand-in for a device is for later releases of torch")
def test_a_backend_for_each_device() -> None:
    def body(rank: int) -> None:
        group = dist.distributed_c10d._get_default_group()
        assert total() == 3.0
        assert {device.type for device in group._device_types} == {"cpu", "meta"}
        dist.all_reduce(torch.ones(2, device="meta"))
        assert total(dist.new_group([0, 1])) == 3.0

    def with_fake(rank: int) -> None:
        from torch.testing._internal.distributed import fake_pg  # noqa: F401

        dist.destroy_process_group()
        with_both(rank)

    def with_both(rank: int) -> None:
        dist.init_process_group(
            "cpu:phalanx,meta:fake",
            init_method=f"file://{path}",
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=20),
        )
        body(rank)

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "second")
        together(2, with_fake)


def test_a_world_of_one() -> None:
    def body(rank: int) -> None:
        assert total() == 1.0
        outputs = [torch.zeros(1)]
        dist.all_gather(outputs, torch.ones(1))
        assert outputs[0].item() == 1.0
        assert total(dist.new_group([0])) == 1.0

    together(1, body)


def test_again_and_nothing_left() -> None:
    def body(rank: int) -> None:
        dist.destroy_process_group()

        def left() -> Counter[str]:
            gc.collect()
            found = Counter(thread.name for thread in threading.enumerate())
            for entry in Path("/proc/self/fd").iterdir():
                with contextlib.suppress(OSError):  # that of the listing itself
                    found[entry.readlink().name.partition(":")[0]] += 1
            found["anon_inode"] -= len(_spare())  # what this thread keeps for its next wait
            return found

        before: Counter[str] | None = None
        for _ in range(3):  # the same store, as under torchrun
            dist.init_process_group("phalanx", store=store(rank), rank=rank, world_size=2)
            assert total() == 3.0
            group = dist.new_group([0, 1])
            dist.all_reduce(torch.ones(1 << 20), group=group, async_op=True).wait()
            dist.all_reduce(torch.ones(1), async_op=True)
            dist.destroy_process_group()
            before = before or left()
        assert before is not None
        assert left() - before == Counter()

    def store(rank: int) -> dist.Store:
        if not stores:
            stores.append(dist.FileStore(path, 2))
        return stores[0]

    stores: list[dist.Store] = []
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "again")
        together(2, body)


def test_by_address() -> None:
    """`env://`, as torchrun and `phalanx run` have it, and `tcp://`."""

    def body(group: object, port: int) -> None:
        rank = group.rank  # type: ignore[attr-defined]
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
        dist.init_process_group("phalanx")
        assert total() == 3.0
        dist.destroy_process_group()

    run_ranks(2, body, free_port(), backend="mesh")


def test_the_token_of_the_job() -> None:
    def body(rank: int) -> None:
        assert total() == 3.0
        world = dist.distributed_c10d._get_default_group().group.backend.world
        assert world.meeting.token == b"a secret"

    together(2, body, env={"PHALANX_TOKEN": "a secret"})


def test_a_token_on_one_rank_only() -> None:
    def body(rank: int) -> str:
        dist.destroy_process_group()
        if rank == 0:
            os.environ["PHALANX_TOKEN"] = "a secret"
        with pytest.raises((ValueError, RuntimeError)) as caught:
            dist.init_process_group(
                "phalanx", init_method=f"file://{path}", rank=rank, world_size=2, timeout=timedelta(seconds=1)
            )
        return str(caught.value)

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "one")
        messages = together(2, body)
    assert "rank 1" in messages[0]
    assert "PHALANX_TOKEN is set on rank 0, but not on rank 1" in messages[1]


def test_a_rank_that_never_comes() -> None:
    def body(rank: int) -> str:
        dist.destroy_process_group()
        if rank == 1:
            return ""
        with pytest.raises(dist.DistNetworkError) as caught:
            dist.init_process_group(
                "phalanx", init_method=f"file://{path}", rank=0, world_size=2, timeout=timedelta(seconds=bound(2.0))
            )
        return str(caught.value)

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "never")
        assert "rank 1" in together(2, body)[0]
