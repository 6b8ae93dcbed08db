"""Operations are seen by everything that watches torch, as those of its own groups are."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.gpu.gpu import needs_gpu
from tests.torch_backend.support import TORCH, all_gather_single, reduce_scatter_single, together
from torch._subclasses import FakeTensorMode
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

with_kernels = pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "Meta"),
    reason="older releases cannot call collectives on tensors without data, on no backend",
)
since_2_15 = pytest.mark.skipif(
    TORCH < (2, 15), reason="older releases split only groups with a device, and record only their own backends"
)
on_both = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
with_hooks = pytest.mark.skipif(TORCH < (2, 14), reason="groups of older releases have no hooks")


class Watch(TorchDispatchMode):  # type: ignore[misc]  # torch is not typed here
    """Writes down what torch does with process groups."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.seen.append(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))


def every_operation(rank: int, *, coalesced: bool = True) -> list[torch.Tensor]:
    """Each operation of torch.distributed once, with two ranks; the tensors after it."""
    x = torch.arange(4.0) + rank
    both, halves = torch.zeros(8), [torch.zeros(4), torch.zeros(4)]
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    dist.broadcast(x, 1)
    dist.reduce(x, 0)
    all_gather_single(both, x)
    dist.all_gather(halves, x + rank)
    reduce_scatter_single(x, both)
    dist.reduce_scatter(x, [half + rank for half in halves])
    swapped, apart = torch.zeros(4), [torch.zeros(4), torch.zeros(4)]
    dist.all_to_all_single(swapped, x + rank)
    dist.all_to_all(apart, [x, x + 1])
    dist.gather(x, halves if rank == 0 else None)
    dist.scatter(swapped, halves if rank == 0 else None)
    calls = [(dist.all_reduce, [x]), (all_gather_single, [both, x]), (reduce_scatter_single, [x, both])]
    for operation, tensors in calls if coalesced else []:
        with _coalescing_manager():
            operation(*tensors)
            operation(*tensors)
    dist.barrier()
    if rank == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
    return [x, both, swapped, *halves, *apart]


OPERATIONS = [
    "allreduce_",
    "broadcast_",
    "reduce_",
    "_allgather_base_",
    "allgather_",
    "_reduce_scatter_base_",
    "reduce_scatter_",
    "alltoall_base_",
    "alltoall_",
    "gather_",
    "scatter_",
    "allreduce_coalesced_",
    "allgather_into_tensor_coalesced_",
    "reduce_scatter_tensor_coalesced_",
    "barrier",
]


@on_both
def test_a_mode_sees_every_operation_and_the_results_are_the_same(device: str) -> None:
    def body(rank: int) -> list[str]:
        torch.set_default_device(device)
        plain = every_operation(rank)
        with Watch() as watch:
            seen = every_operation(rank)
        assert all(torch.equal(one, other) for one, other in zip(plain, seen, strict=True))
        return watch.seen

    assert together(2, body) == [[*OPERATIONS, "send"], [*OPERATIONS, "recv_"]]


EVENTS = {
    "all_reduce",
    "broadcast",
    "reduce",
    "_all_gather_base",
    "all_gather",
    "_reduce_scatter_base",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
    "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor_coalesced",
    "barrier",
}
"""What the profiler shows of them, beside what the dispatcher does."""


@on_both
def test_communication_is_counted_and_profiled(device: str) -> None:
    def body(rank: int) -> tuple[int, set[str]]:
        torch.set_default_device(device)
        with CommDebugMode() as counts:
            for _ in range(3):
                dist.all_reduce(torch.ones(4))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            every_operation(rank)
        return counts.get_total_counts(), {event.key for event in profile.key_averages()}

    for count, profiled in together(2, body):
        assert count == 3
        assert profiled >= {f"c10d::{name}" for name in OPERATIONS}
        assert profiled >= {f"phalanx:{name}" for name in EVENTS}
        assert "phalanx:send" in profiled or "phalanx:recv" in profiled


@on_both
def test_events_have_shapes_and_last_until_the_end(device: str) -> None:
    def body(rank: int) -> list[tuple[str, bool, list[list[int]]]]:
        torch.set_default_device(device)
        x, late = torch.ones(2, 3), torch.ones(4)
        with torch.autograd.profiler.profile(record_shapes=True) as profile:  # type: ignore[no-untyped-call]
            dist.all_reduce(x)
            work = dist.all_reduce(late, async_op=True)
            assert work is not None
            work.wait()
            if rank == 0:
                dist.send(x, 1)
            else:
                dist.recv(x)
            with pytest.raises(ValueError, match="float8"):
                dist.all_reduce(torch.zeros(2, dtype=torch.float8_e5m2))
        events = [event for event in profile.function_events if event.name.startswith("phalanx:")]
        assert all(event.cpu_time > 0 for event in events)
        return [(event.name.partition(":")[2], event.is_async, event.input_shapes) for event in events]

    reductions = [("all_reduce", True, [shape]) for shape in ([2, 3], [4])]
    failed = ("all_reduce", True, [[2]])
    assert together(2, body) == [
        [*reductions, ("send", True, [[2, 3]]), failed],
        [*reductions, ("recvAnySource", True, [[2, 3]]), failed],
    ]


@with_kernels
def test_fake_tensors_are_not_sent() -> None:
    def body(rank: int) -> None:
        issued = torch.full((1 << 15,), rank + 1.0).expand(2, -1).t()  # waited for below, and copied to there
        issued = issued.clone(memory_format=torch.preserve_format)
        work = dist.all_reduce(issued, async_op=True)
        with FakeTensorMode() as mode:
            every_operation(rank, coalesced=False)  # torch has no fake ones
            fake = torch.ones(4)
            if rank == 0:  # it would wait for the other rank
                dist.all_reduce(fake)
                dist.broadcast(fake, 1)
            assert work is not None
            work.wait()
        assert bool((issued == 3).all())
        if rank == 0:
            dist.all_reduce(fake)  # also where the mode is over
            dist.all_gather([mode.from_tensor(torch.ones(4)) for _ in range(2)], fake)
            with pytest.raises(
                ValueError, match="FakeTensor of shape .4,. has no memory"
            ):  # lists of lists are not looked at
                dist.all_gather([torch.ones(4), fake], torch.ones(4))
        total = torch.ones(4)
        dist.all_reduce(total)
        assert total.tolist() == [2, 2, 2, 2]

    together(2, body)


def test_a_subclass_says_what_is_sent() -> None:
    def body(rank: int) -> None:
        class Wrapped(torch.Tensor):
            inner: Any

            @staticmethod
            def __new__(cls: Any, inner: Any) -> Any:
                made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
                made.inner = inner
                return made

            @classmethod
            def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                def unwrapped(tree: Any) -> Any:
                    return [t.inner if isinstance(t, cls) else t for t in tree] if isinstance(tree, list) else tree

                return func(*map(unwrapped, args), **(kwargs or {}))

        tensor = Wrapped(torch.full((4,), rank + 1.0))
        dist.all_reduce(tensor)
        assert tensor.inner.tolist() == [3, 3, 3, 3]

    together(2, body)


def test_errors_are_the_same_under_a_mode() -> None:
    def body(rank: int) -> None:
        wrong = torch.zeros(3), torch.zeros(4)
        for call in (
            lambda: all_gather_single(*wrong),
            lambda: dist.all_reduce(torch.zeros(2, dtype=torch.float8_e5m2)),
            lambda: dist.recv(torch.zeros(1), 7),
        ):
            with pytest.raises(Exception) as plain:  # noqa: PT011
                call()
            with Watch(), pytest.raises(type(plain.value)) as seen:
                call()
            assert str(seen.value) == str(plain.value)

    together(2, body)


def test_another_backend_beside_it_is_left_alone() -> None:
    def body(rank: int) -> None:
        gloo = dist.new_group(backend="gloo")
        for group in (None, gloo, None, gloo):
            with Watch() as watch:
                x = torch.full((4,), rank + 1.0)
                dist.all_reduce(x, dist.ReduceOp.PRODUCT, group=group)
                assert x.tolist() == [2, 2, 2, 2]
            assert watch.seen == ["allreduce_"]

    together(2, body)


@with_hooks
def test_a_traced_program_communicates_again() -> None:
    def body(rank: int) -> None:
        from torch.fx.experimental.proxy_tensor import make_fx

        def program(x: torch.Tensor) -> torch.Tensor:
            doubled = x * 2
            dist.all_reduce(doubled, dist.ReduceOp.MAX)
            return doubled + 1

        graph = make_fx(program)(torch.ones(4))
        assert graph(torch.full((4,), rank + 1.0)).tolist() == [5, 5, 5, 5]

    together(2, body)


@with_hooks
def test_hooks_see_every_operation() -> None:
    def body(rank: int) -> int:
        seen: list[Any] = []
        dist.group.WORLD.register_pre_hook(17, seen.append)  # type: ignore[union-attr, attr-defined]
        every_operation(rank)
        return len(seen)

    assert together(2, body) == [len(OPERATIONS) + 1] * 2


@since_2_15
def test_the_flight_recorder_has_every_operation() -> None:
    def body(rank: int) -> list[str]:
        every_operation(rank)
        trace = torch._C._distributed_c10d._dump_fr_trace_json(backend="phalanx")  # type: ignore[attr-defined]
        return [entry["profiling_name"] for entry in json.loads(trace)["entries"]]

    for names in together(2, body, env={"TORCH_FR_BUFFER_SIZE": "100"}):
        assert len(names) == len(OPERATIONS) + 1
        assert names[0] == "phalanx:all_reduce"


@since_2_15
def test_a_group_is_split() -> None:
    def body(rank: int) -> None:
        odd_even = dist.split_group(split_ranks=[[2, 0], [1, 3]])
        x = torch.tensor([float(rank)])
        dist.all_reduce(x, group=odd_even)
        assert x.item() == (2 if rank % 2 == 0 else 4)
        assert dist.get_rank(odd_even) == [1, 0, 0, 1][rank]
        alone = dist.split_group(odd_even, split_ranks=[[0]])
        if dist.get_rank(odd_even) == 0:
            assert dist.get_world_size(alone) == 1
        else:
            assert alone is dist.GroupMember.NON_GROUP_MEMBER

    together(4, body)


@with_kernels
def test_a_backend_may_look_at_the_group_that_it_is_made_for() -> None:
    def body(rank: int) -> None:
        import torch.testing._internal.distributed.fake_pg  # registers the backend

        dist.all_reduce(torch.ones(4, device="meta"))
        x = torch.ones(4)
        dist.all_reduce(x)
        assert x.tolist() == [2, 2, 2, 2]
        assert dist.group.WORLD._device_types == [torch.device("cpu"), torch.device("meta")]  # type: ignore[union-attr]

    together(2, body, backend="cpu:phalanx,meta:fake")
