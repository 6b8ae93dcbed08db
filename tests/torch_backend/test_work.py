"""What torch gives back for an asynchronous operation."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.torch_backend.support import all_gather_single, together


def test_a_work() -> None:
    def body(rank: int) -> None:
        for count in (4, 1 << 20):  # one that whoever waits runs, and one that a thread runs
            tensor = torch.ones(count)
            work = dist.all_reduce(tensor, async_op=True)
            assert work.wait()
            assert work.is_completed()
            assert work.is_success()
            assert work.exception() is None
            assert work.result()[0] is tensor
            assert tensor[0].item() == 2.0
            work.synchronize()
            assert work.get_future().value()[0] is tensor
            assert work.wait(timedelta(seconds=1))

    together(2, body)


def test_futures_and_their_callbacks() -> None:
    def body(rank: int) -> None:
        for count in (4, 1 << 20):
            tensor = torch.ones(count)
            work = dist.all_reduce(tensor, async_op=True)
            seen: list[float] = []
            future = work.get_future().then(lambda done, seen=seen: seen.append(done.value()[0][0].item()) or "next")
            assert future.wait() == "next"
            assert seen == [2.0]
            assert work.get_future() is work.get_future()

    together(2, body)


def test_it_ends_though_nobody_waits() -> None:
    def body(rank: int) -> None:
        for count in (4, 1 << 20):
            for _ in range(2):
                work = dist.all_reduce(torch.ones(count), async_op=True)
                deadline = time.monotonic() + 10
                while not work.is_completed():
                    assert time.monotonic() < deadline
                    time.sleep(0.001)
            time.sleep(0.1)  # by then the thread sleeps for good, and must be woken

    together(2, body)


def test_it_keeps_what_the_caller_lets_go() -> None:
    def body(rank: int) -> None:
        for count in (4, 1 << 18):
            outputs = [torch.empty(2 * count) for _ in range(8)]
            works = [all_gather_single(out, torch.full((count,), 1.0 + rank), async_op=True) for out in outputs]
            works += [dist.all_to_all_single(out, torch.full((2 * count,), 1.0), async_op=True) for out in outputs[4:]]
            works += [dist.isend(torch.full((count,), 7.0), 1 - rank)]
            noise = [torch.full((count,), -1.0) for _ in range(20)]
            received = torch.empty(count)
            dist.recv(received, 1 - rank)
            for work in works:
                work.wait()
            assert received.unique().tolist() == [7.0]
            assert outputs[0].unique().tolist() == [1.0, 2.0]
            assert outputs[7].unique().tolist() == [1.0]
            del noise

    together(2, body)


def test_it_does_not_block() -> None:
    """Each rank does something between that the other waits for: the order of two groups, or a message."""

    def body(rank: int) -> None:
        other = dist.new_group([0, 1])
        first, second = (None, other) if rank == 0 else (other, None)
        works = [dist.all_reduce(torch.ones(1), group=group, async_op=True) for group in (first, second)]
        for work in works:
            work.wait()
        tensor = torch.zeros(1)
        if rank == 0:
            work = dist.all_reduce(torch.ones(1), async_op=True)
            dist.recv(tensor, 1)
            work.wait()
        else:
            dist.send(tensor, 0)
            dist.all_reduce(torch.ones(1))

    together(2, body)


def test_the_order_in_which_they_were_issued() -> None:
    def body(rank: int) -> None:
        tensors = [torch.full((1 << (4 * (i % 4)),), float(i)) for i in range(40)]
        works = [dist.all_reduce(tensor, async_op=i % 3 != 0) for i, tensor in enumerate(tensors)]
        for work in reversed(works):
            if work is not None:
                work.wait()
        assert [tensor[0].item() for tensor in tensors] == [2.0 * i for i in range(40)]

    together(2, body)


def test_a_wait_with_a_limit() -> None:
    def body(rank: int) -> None:
        tensor = torch.ones(1)
        if rank == 0:
            work = dist.all_reduce(tensor, async_op=True)
            with pytest.raises(dist.DistBackendError, match=r" Timed out "):
                work.wait(timedelta(seconds=0.2))
            receive = dist.irecv(tensor.clone(), 1)
            with pytest.raises(dist.DistBackendError, match=r" Timed out "):
                receive.wait(timedelta(seconds=0.2))
            work.wait()
            receive.wait()
        else:
            time.sleep(0.8)
            dist.all_reduce(tensor)
            dist.send(tensor, 0)
        assert tensor.item() == 2.0

    together(2, body)


def test_several_threads() -> None:
    def body(rank: int) -> None:
        groups = [dist.new_group([0, 1]) for _ in range(3)]
        found: list[float] = []

        def work(group: dist.ProcessGroup) -> None:
            for _ in range(50):
                tensor = torch.ones(2)
                dist.all_reduce(tensor, group=group)
                found.append(tensor[1].item())

        threads = [threading.Thread(target=work, args=(group,)) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [2.0] * 150

    together(2, body)


@pytest.mark.parametrize("way", ["wait", "future", "synchronous", "limit"])
def test_a_callback_may_issue_operations_and_wait_for_them(way: str) -> None:
    """As torch's PowerSGD does, in whichever thread the callback runs: here in that of the queue."""

    def nested(way: str) -> float:
        tensor = torch.ones(1 << 15)
        if way == "synchronous":
            dist.all_reduce(tensor)
        else:
            work = dist.all_reduce(tensor, async_op=True)
            if way == "future":
                work.get_future().wait()
            else:
                work.wait(timedelta(seconds=10) if way == "limit" else timedelta(0))
        return tensor[7].item()

    def body(rank: int) -> None:
        for size in (1, 1 << 15):  # the second wakes the thread
            first, second = (dist.all_reduce(torch.ones(size), async_op=True) for _ in range(2))
            answer = first.get_future().then(lambda done: nested(way))
            time.sleep(0.05 * rank)
            assert answer.wait() == 2.0
            answer = second.get_future().then(lambda done: nested(way)).then(lambda done: done.value() + nested(way))
            assert answer.wait() == 4.0

    together(2, body)


def test_a_callback_of_a_wait_may_wait() -> None:
    """Here it runs in the thread that waits for the operation."""

    def body(rank: int) -> None:
        found: list[float] = []

        def again(_done: object) -> None:
            tensor = torch.ones(1)
            dist.all_reduce(tensor, async_op=True).wait()
            found.append(tensor.item())

        for _ in range(20):
            work = dist.all_reduce(torch.ones(1), async_op=True)
            work.get_future().then(again)
            work.wait()
            while len(found) <= _:
                time.sleep(0.001)
        assert found == [2.0] * 20

    together(2, body)


def test_a_callback_of_a_message_may_wait_for_another() -> None:
    def body(rank: int) -> None:
        first, second = torch.zeros(1 << 18), torch.zeros(1 << 18)
        if rank == 0:
            done = dist.irecv(first, 1).get_future().then(lambda _done: dist.irecv(second, 1).wait())
            done.wait()
            assert (first[5].item(), second[5].item()) == (1.0, 2.0)
        else:
            time.sleep(0.1)
            dist.send(torch.ones(1 << 18), 0)
            time.sleep(0.1)
            dist.send(torch.full((1 << 18,), 2.0), 0)

    together(2, body)
