"""torch's options are read where they lie, and as their names would say."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from tests.torch_backend.support import together
from tests.torch_backend.test_fast_calls import meet, options_for

from phalanx.errors import SizeMismatch
from phalanx.torch_backend import fast_calls, option_fields
from phalanx.torch_backend.fast_calls import _OPTIONS, are_available
from phalanx.torch_backend.option_fields import places_of
from phalanx.torch_backend.work import FinishedWork

pytestmark = pytest.mark.skipif(not are_available(), reason="there are no fast calls")


class Unlike:
    """Options that lie elsewhere."""

    def __init__(self) -> None:
        self.asyncOp = True
        self.timeout = timedelta(milliseconds=-1)


@pytest.mark.parametrize("name", _OPTIONS)
def test_all_fields_are_found(name: str) -> None:
    kind, has_op, has_root = _OPTIONS[name]
    found = places_of(kind, has_op=has_op, has_root=has_root)
    assert len(found) == 5
    assert (found[3] >= 0, found[4] >= 0) == (has_op, has_root)
    assert len({place for place in found[1:] if place >= 0}) == 2 + has_op + has_root


def test_other_classes_are_asked_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert places_of(Unlike, has_op=False, has_root=False) == []
    monkeypatch.setattr(option_fields, "_MEMORY", "/nonexistent")
    assert places_of(c10d.AllreduceOptions, has_op=True, has_root=False) == []


@pytest.mark.parametrize("in_place", [True, False])
def test_both_ways_read_the_same(in_place: bool) -> None:
    def body(rank: int) -> list[Any]:
        group: Any = c10d._get_default_group()
        seen: list[Any] = []
        if not in_place:
            fast_calls.places_of = lambda *args, **kwargs: []  # type: ignore[assignment]
            fast_calls._access.cache_clear()
            group._use(group.group)
        meet()
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT, dist.ReduceOp.AVG):
            for later in (False, True):
                x = torch.tensor([1.0 + rank, 4.0])
                options = options_for(c10d.AllreduceOptions, later=later)
                options.reduceOp = op
                work = group.allreduce([x], options)
                assert (type(work) is FinishedWork) != later
                work.wait()
                seen.append(x.tolist())
        for root in (0, 1):
            x = torch.tensor([float(rank)])
            dist.broadcast(x, root)
            y = torch.tensor([rank + 1.0])
            dist.reduce(y, root, dist.ReduceOp.MAX)
            seen += [x.tolist(), y.tolist() if rank == root else None]
        limited = options_for(c10d.BarrierOptions, later=False)
        limited.timeout = timedelta(seconds=20)
        assert group.fast_calls.barrier(limited) is None  # it has a timeout of its own
        group.barrier(limited).wait()
        return seen

    found = together(2, body)
    assert found[0][:4] == [[3.0, 8.0]] * 2 + [[2.0, 4.0]] * 2
    assert found[0][10:] == [[0.0], [2.0], [1.0], None]
    assert found[1][10:] == [[0.0], None, [1.0], [2.0]]


def test_calls_that_wait_make_no_handle() -> None:
    def body(rank: int) -> None:
        meet()
        made: list[str] = []
        begin = dist.Work.__init__

        def note(self: Any) -> None:
            made.append(type(self).__name__)
            begin(self)

        dist.Work.__init__ = note  # type: ignore[method-assign]
        fast_calls._access.cache_clear()  # as if that had been torch's own
        group: Any = c10d._get_default_group()
        group._use(group.group)
        made.clear()  # the one that all such calls share
        x = torch.ones(1 << 16)
        for tensor in (x[:1], x[:4096], x):
            if rank == 0:
                dist.send(tensor * 2, 1)
            else:
                assert dist.recv(tensor, 0) == 0
                assert tensor[-1] == 2
        dist.all_reduce(x[:1])
        dist.barrier()
        assert made == []
        dist.all_reduce(x[:1], async_op=True).wait()
        assert made == ["PreparedWork"]

    together(2, body)


def test_a_message_that_is_late_or_does_not_fit() -> None:
    def body(rank: int) -> None:
        meet()
        for count in (1, 1 << 20):
            x = torch.full((count,), float(rank))
            dist.barrier()
            if rank == 0:
                time.sleep(0.3)
                dist.send(x + 5, 1)
            else:
                assert dist.recv(x, 0) == 0
                assert x[-1] == 5
        dist.barrier()
        if rank == 0:
            dist.send(torch.ones(3), 1)
        else:
            with pytest.raises(SizeMismatch, match=r"rank 0 sent float32\[3\]"):
                dist.recv(torch.zeros(2), 0)

    together(2, body)
