"""Handles that the core makes: what a program asks of them before, while and after the operation runs."""

from __future__ import annotations

import inspect
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.torch_backend.support import together
from tests.torch_backend.test_fast_calls import default, meet, options_for, pytestmark

from phalanx.torch_backend.collective_work import PreparedWork
from phalanx.torch_backend.message_work import PreparedMessageWork

__all__ = ["pytestmark"]


def test_threads_that_ask_while_another_one_waits() -> None:
    def body(rank: int) -> list[Any]:
        meet()
        seen: list[Any] = []
        store = dist.distributed_c10d._get_default_store()
        for message in (False, True):
            x = torch.ones(2)
            if rank == 1:
                store.wait([f"asked {message}"])
                dist.send(torch.full((2,), 2.0), 0) if message else dist.all_reduce(x)
                continue
            work = dist.irecv(x, 1) if message else dist.all_reduce(x, async_op=True)
            assert type(work) is (PreparedMessageWork if message else PreparedWork)
            found: dict[str, Any] = {}
            asks = {
                "wait": lambda work=work: work.wait(),
                "limited": lambda work=work: work.wait(timedelta(seconds=20)),
                "future": lambda work=work: work.get_future().wait()[0].tolist(),
                "callback": lambda work=work: work.get_future().then(lambda done: done.value()[0].tolist()).wait(),
            }
            threads = [
                threading.Thread(target=lambda name=name, ask=ask, found=found: found.update({name: ask()}))
                for name, ask in asks.items()
            ]
            for thread in threads:
                thread.start()
                time.sleep(0.02)  # the first one runs it, the others come while it does
            assert not work.is_completed()
            assert not work.is_success()
            with pytest.raises(RuntimeError, match="under way"):
                work.result()
            store.set(f"asked {message}", "")  # now the other rank comes
            for thread in threads:
                thread.join(20)
            assert work.is_completed()
            assert work.is_success()
            assert work.result()[0] is x
            assert work.get_future() is work.get_future()
            seen.append(found)
        return seen

    expected = {"wait": True, "limited": True, "future": [2.0, 2.0], "callback": [2.0, 2.0]}
    assert together(2, body)[0] == [expected, expected]


def test_an_error_is_the_same_whoever_asks() -> None:
    def body(rank: int) -> None:
        meet()
        work = dist.all_reduce(torch.ones(3 + rank), async_op=True)
        with pytest.raises(dist.DistBackendError, match="all_reduce") as caught:
            work.wait()
        assert [entry.path.name for entry in caught.traceback] == ["test_handles.py"]
        assert work.is_completed()
        assert not work.is_success()
        assert work.exception() is caught.value
        for ask in (work.wait, work.synchronize, work.result, lambda: work.wait(timedelta(seconds=1))):
            with pytest.raises(dist.DistBackendError) as again:
                ask()
            assert again.value is caught.value
        with pytest.raises(RuntimeError, match="all_reduce"):
            work.get_future().wait()

    together(2, body)


def test_the_handle_of_a_receive() -> None:
    def body(rank: int) -> None:
        meet()
        for count in (4, 1 << 20):
            x, y = torch.full((count,), 1.0 + rank), torch.zeros(count)
            works = [dist.isend(x, 1 - rank), dist.irecv(y, 1 - rank)]
            for work in works:
                assert work.wait()
                assert work.is_completed()
                assert work.is_success()
                assert work.exception() is None
            assert works[1].result()[0] is y
            assert works[1]._source_rank() == 1 - rank
            assert works[1].get_future().value()[0] is y
            assert y.unique().tolist() == [2.0 - rank]

    together(2, body)


def test_receives_are_waited_for_in_any_order() -> None:
    def body(rank: int) -> None:
        meet()
        outputs = [torch.zeros(2) for _ in range(8)]
        works = [dist.irecv(out, 1 - rank) for out in outputs]
        for i in range(8):
            dist.send(torch.full((2,), float(i)), 1 - rank)
        for work in reversed(works):
            work.wait()
        assert [out[0].item() for out in outputs] == [float(i) for i in range(8)]

    together(2, body)


def test_operations_look_like_functions() -> None:
    def body(rank: int) -> None:
        meet()
        group = default()
        assert list(inspect.signature(group.barrier).parameters) == ["opts", "timeout"]
        assert inspect.isfunction(type(group).allreduce)
        assert group.allreduce.__name__ == "allreduce"
        assert "Raises" in (group.send.__doc__ or "")
        names = list(inspect.signature(group.allreduce).parameters)
        x = torch.ones(1)
        options = options_for(dist.distributed_c10d.AllreduceOptions, later=False)
        group.allreduce(**dict(zip(names, ([x], options), strict=False))).wait()
        assert x.item() == 2.0
        with pytest.raises(TypeError, match="argument"):
            group.allreduce()

    together(2, body)


def test_a_dropped_handle_has_its_operation_run() -> None:
    def body(rank: int) -> list[float]:
        meet()
        x, y = torch.ones(2), torch.ones(2)
        for _ in range(3):
            dist.all_reduce(x, async_op=True)
        dist.all_reduce(y)
        return [*x.tolist(), *y.tolist()]

    assert together(2, body) == [[8.0, 8.0, 2.0, 2.0]] * 2
