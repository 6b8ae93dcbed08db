"""The arguments of an operation on their way to the group of another device."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from phalanx.torch_backend.request import OperationRequest


def test_arguments_that_are_given_one_by_one_are_passed_on() -> None:
    request = OperationRequest(None, timeout=timedelta(seconds=7), op=dist.ReduceOp.MAX, root=3)
    options = request.options(c10d.ReduceOptions)
    assert (options.reduceOp, options.rootRank, options.timeout) == (dist.ReduceOp.MAX, 3, timedelta(seconds=7))
    assert request.options(c10d.AllreduceOptions).reduceOp == dist.ReduceOp.MAX
    assert request.options(c10d.BroadcastOptions).rootRank == 3
    again = OperationRequest(request.options(c10d.ReduceOptions))
    assert (again.op, again.root, again.seconds) == (dist.ReduceOp.MAX, 3, 7.0)


def test_a_reduction_or_a_root_in_the_place_of_the_options() -> None:
    assert OperationRequest(dist.ReduceOp.MIN).options(c10d.AllreduceOptions).reduceOp == dist.ReduceOp.MIN
    assert OperationRequest(1).options(c10d.BroadcastOptions).rootRank == 1


def test_options_are_passed_on_as_they_are() -> None:
    options = c10d.AllreduceOptions()
    assert OperationRequest(options).options(c10d.AllreduceOptions) is options


def test_without_a_timeout_the_other_group_has_its_own() -> None:
    assert OperationRequest().options(c10d.AllreduceOptions).timeout == c10d.AllreduceOptions().timeout
