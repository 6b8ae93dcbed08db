"""What goes wrong, and what torch's users are told of it."""

from __future__ import annotations

import functools
import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch._dynamo  # data parallel asks for it, and it takes seconds
import torch.distributed as dist
from tests.lateness import bound
from tests.torch_backend.support import TORCH, together
from torch import nn

from phalanx.errors import Desync, PeerLost, Timeout
from phalanx.torch_backend.create import times_of


def steps(model: nn.Module, count: int) -> None:
    for _ in range(count):
        model(torch.ones(2, 8)).sum().backward()


def first_line(function: Any) -> int:
    """Of its file."""
    line: int = function.__code__.co_firstlineno
    return line


def test_a_killed_rank_in_a_collective() -> None:
    def body(rank: int) -> Any:
        dist.all_reduce(torch.ones(1))
        if rank == 1:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(dist.DistNetworkError, match="rank 1 is lost") as caught:
            dist.all_reduce(torch.ones(1))
        assert isinstance(caught.value.phalanx_error, PeerLost)
        with pytest.raises(RuntimeError, match="rank 1 is lost"):
            dist.all_reduce(torch.ones(1), async_op=True).wait()
        return time.monotonic() - begin

    seconds = together(3, body, may_die=[1])
    assert max(seconds[0], seconds[2]) < bound(0.3 + 1.0)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_killed_rank_under_data_parallel(ranks: int) -> None:
    """It dies while the others are in backward: they wait for its gradients."""

    def body(rank: int) -> Any:
        model = nn.parallel.DistributedDataParallel(
            nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8)), bucket_cap_mb=0.001
        )
        steps(model, 3)
        dist.barrier()
        begin = time.monotonic()
        if rank == 1:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RuntimeError, match="rank 1 is lost"):
            steps(model, 1)
        return time.monotonic() - begin - 0.3

    seconds = together(ranks, body, may_die=[1])
    del seconds[1]
    assert max(seconds) < bound(1.0)


def test_a_mismatch_is_named_on_both() -> None:
    def body(rank: int) -> str:
        dist.all_reduce(torch.ones(1))
        operation = dist.all_reduce if rank == 0 else functools.partial(dist.broadcast, src=0)
        with pytest.raises(dist.DistBackendError, match="All ranks of a group must call") as caught:
            operation(torch.ones(5))
        assert isinstance(caught.value.phalanx_error, Desync)
        return str(caught.value)

    for message in together(2, body):
        assert "all_reduce(op=sum) #2" in message
        assert "broadcast(src=0) #2" in message


def test_another_number_of_steps() -> None:
    """Both ranks are told both operations, each with the line of the user's program that it came from."""

    def body(rank: int) -> Any:
        model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
        with pytest.raises(RuntimeError, match="All ranks of a group must call") as caught:  # noqa: PT012
            for _ in range(3 + rank):
                loss = model(torch.ones(2, 8)).sum()
                loss.backward()
            dist.all_reduce(loss)
        return str(caught.value), first_line(body)

    for message, start in together(2, body):
        assert f"all_reduce(op=sum) #9 of float32[72] at test_failures.py:{start + 5} in body" in message
        assert f"all_reduce(op=sum) #9 of float32[1] at test_failures.py:{start + 6} in body" in message


def test_the_line_of_a_call_that_another_thread_runs() -> None:
    """The queue's thread, and C++: `broadcast` comes from the forward of data parallel, which makes new buckets."""

    def body(rank: int) -> Any:
        model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
        model(torch.ones(2, 8)).sum().backward()
        if rank == 0:
            with pytest.raises(RuntimeError, match="All ranks of a group must call") as caught:
                model(torch.ones(2, 8)).sum().backward()
        else:
            work = dist.all_gather([torch.ones(1 << 20)] * 2, torch.ones(1 << 20), async_op=True)
            while not work.is_completed():
                time.sleep(0.01)
            with pytest.raises(RuntimeError, match="All ranks of a group must call") as caught:
                work.wait()
        return str(caught.value), first_line(body)

    for message, start in together(2, body):
        assert f"at test_failures.py:{start + 5} in body" in message
        assert f"at test_failures.py:{start + 7} in body" in message


def test_the_line_of_a_message() -> None:
    def body(rank: int) -> Any:
        group = dist.new_group([0, 1], timeout=timedelta(seconds=0.3))
        if rank == 1:
            dist.barrier()
            return "", 0
        with pytest.raises(dist.DistBackendError) as caught:
            dist.recv(torch.ones(1), 1, group=group)
        dist.barrier()
        return str(caught.value), first_line(body)

    message, start = together(2, body)[0]
    assert f"at test_failures.py:{start + 6} in body" in message


@pytest.mark.parametrize(
    ("given", "variable", "operation", "meeting"),
    [
        (timedelta(minutes=30), None, 1800, 1800),  # torch's default: the program has said nothing
        (timedelta(minutes=30), "7", 7, 1800),
        (timedelta(seconds=3), "7", 3, 3),
    ],
)
def test_the_variable_counts_where_the_program_says_nothing(
    monkeypatch: pytest.MonkeyPatch, given: timedelta, variable: str | None, operation: float, meeting: float
) -> None:
    monkeypatch.delenv("PHALANX_TIMEOUT", raising=False)
    if variable is not None:
        monkeypatch.setenv("PHALANX_TIMEOUT", variable)
    assert times_of(given) == (operation, meeting)


def test_a_deadline() -> None:
    def body(rank: int) -> None:
        group = dist.new_group([0, 1], timeout=timedelta(seconds=0.4))
        if rank == 0:
            begin = time.monotonic()
            with pytest.raises(dist.DistBackendError, match=r"(?s) Timed out .* missing: 1") as caught:
                dist.barrier(group)
            assert isinstance(caught.value.phalanx_error, Timeout)
            assert 0.4 <= time.monotonic() - begin < bound(2.0)
        else:
            time.sleep(1.2)
        dist.barrier()  # the other group is as good as new
        default = dist.distributed_c10d._get_default_group()
        default.set_timeout(timedelta(seconds=0.3))
        if rank == 0:
            with pytest.raises(dist.DistBackendError, match=" Timed out "):
                dist.all_reduce(torch.ones(1))
        else:
            time.sleep(1.0)

    together(2, body)


def test_monitored_barrier() -> None:
    def body(rank: int) -> None:
        group = dist.distributed_c10d._get_default_group()
        group.monitored_barrier(timedelta(seconds=5))
        group.monitored_barrier(timedelta(seconds=5), wait_all_ranks=True)
        if rank == 0:
            with pytest.raises(dist.DistBackendError, match="Rank 2 failed to pass monitoredBarrier in 300 ms"):
                group.monitored_barrier(timedelta(seconds=0.3))
        elif rank == 1:
            with pytest.raises(dist.DistBackendError, match="while waiting for send/recv from rank 0"):
                group.monitored_barrier(timedelta(seconds=0.6))
        dist.barrier()
        if rank == 0:
            with pytest.raises(dist.DistBackendError, match="Ranks 1, 2 failed to pass"):
                group.monitored_barrier(timedelta(seconds=0.1), wait_all_ranks=True)
            with pytest.raises(dist.DistBackendError, match="Rank 0 timed out in monitoredBarrier"):
                group.monitored_barrier(timedelta(seconds=0))
        dist.barrier()

    together(3, body)


def test_what_is_refused_before_anything_is_sent() -> None:
    def body(rank: int) -> None:
        group = dist.distributed_c10d._get_default_group()
        with pytest.raises(ValueError, match="meta"):
            dist.all_reduce(torch.ones(1, device="meta"))
        with pytest.raises(ValueError, match="is not defined for float32"):
            dist.all_reduce(torch.ones(1), dist.ReduceOp.BAND)
        with pytest.raises(ValueError, match="cannot be reduced"):
            dist.all_reduce(torch.ones(1).to(torch.float8_e5m2))
        with pytest.raises(ValueError, match="does not fit 2 ranks"):
            group.all_gather_single(torch.empty(3), torch.empty(1))
        with pytest.raises(ValueError, match="expected 2, one for each rank"):
            group.allgather([[torch.empty(1)]], [torch.empty(1)])
        with pytest.raises(ValueError, match="different dtypes"):
            group.all_gather_single(torch.empty(2), torch.empty(1, dtype=torch.float64))
        with pytest.raises(ValueError, match="split sizes"):
            dist.all_to_all_single(torch.empty(3), torch.empty(3), [1, 2], [1, 1])
        with pytest.raises(ValueError, match="equal parts"):
            dist.all_to_all_single(torch.empty(3), torch.empty(3))
        with pytest.raises(ValueError, match="rank 5"):
            group.send([torch.ones(1)], 5, 0)
        with pytest.raises(ValueError, match="only be summed"):
            dist.all_reduce(torch.eye(2).to_sparse(), dist.ReduceOp.MAX)
        dist.barrier()

    together(2, body)


def test_abort() -> None:
    def body(rank: int) -> None:
        group = dist.new_group([0, 1])
        dist.barrier(group)
        if rank == 0:
            group.abort()
            with pytest.raises(dist.DistBackendError, match="closed"):
                dist.barrier(group)
        else:
            with pytest.raises(dist.DistNetworkError, match="rank 0 .*aborted"):
                dist.barrier(group)
        dist.barrier()  # the others go on
        if rank == 0:
            begin = time.monotonic()
            if TORCH < (2, 7):  # there it is for NCCL alone
                dist.distributed_c10d._get_default_group().abort()
            else:
                dist.distributed_c10d._abort_process_group()
            assert time.monotonic() - begin < bound(5.0)  # it does not wait for the others to leave
        else:
            with pytest.raises(dist.DistNetworkError, match="rank 0 .*aborted"):
                dist.barrier()

    together(2, body)
