"""Ways to train, each run twice on the ranks of one world: with `px.parallel.DDP`, and with a measure of it.

A case gets a `Trial`, trains a little, and returns tensors. Where torch's own wrapper can do it, its results on Gloo
are the measure. Where it cannot, or would leave the ranks with different gradients, the measure is the mean over all
ranks of what each computes for itself: such a case returns gradients, which are linear in those of the ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo  # torch's wrapper needs it: so it is there before the ranks are forked
import torch.distributed as dist
from tests.parallel.cases import backwards, checkpointing, exceptions, gradients, loops, modes, outputs, parameters  # noqa: F401
from tests.parallel.cases.table import CASES, Case, Plain, Trial, quiet
from torch.nn.parallel import DistributedDataParallel

import phalanx as px

__all__ = ["CASES", "run"]


def run(world: px.Group, path: str) -> dict[str, str]:
    """Runs all cases on this rank. Says of each what is wrong with it; nothing, if all is right."""
    torch.set_num_threads(1)
    rank, size = world.rank, world.world_size
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    found = {}
    for name, row in CASES.items():
        with world.subgroup(range(size)) as group:  # one that a case has broken is not the next one's
            found[name] = _judge(row, group)
        # A rank that failed early waits for the others here.
        everyone = world.all_gather_object(found[name])
        found[name] = next((words for words in everyone if words), "")
    dist.destroy_process_group()
    return found


def _judge(row: Case, group: px.Group) -> str:
    rank, size = group.rank, group.world_size

    def of_torch(module: Any, *, bucket_bytes: int = 25 << 20, **options: Any) -> Any:
        return DistributedDataParallel(module, bucket_cap_mb=bucket_bytes / (1 << 20), **options)

    def of_phalanx(module: Any, **options: Any) -> Any:
        return px.parallel.DDP(module, group, **options)

    with quiet():
        if row.like_torch:
            wanted = _flat(row.train(Trial(rank, size, of_torch, False)))
        else:
            wanted = _mean(_flat(row.train(Trial(rank, size, lambda module, **_: Plain(module), False))))
        try:
            found = _flat(row.train(Trial(rank, size, of_phalanx, True)))
            ours = group.all_gather_object(
                [bytes(_plain(value).reshape(-1).view(torch.uint8).numpy()) for value in found]
            )
        except Exception as error:
            return f"rank {rank}: {type(error).__name__}: {error}"
    if len(found) != len(wanted):
        return f"rank {rank}: {len(found)} results, expected {len(wanted)}"
    for place, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        try:
            torch.testing.assert_close(_plain(mine), _plain(theirs))
        except AssertionError as error:
            return f"rank {rank}, result {place}: {error}"
    return "" if not row.equal or all(other == ours[0] for other in ours) else "the ranks have different bits"


def _flat(value: Any) -> list[Any]:
    return [part for item in value for part in _flat(item)] if isinstance(value, (list, tuple)) else [value]


def _plain(value: Any) -> Any:
    """A tensor, whatever it was."""
    if isinstance(value, str):
        return torch.tensor(list(value.encode()))
    if value is None:
        return torch.tensor([])
    return torch.as_tensor(value)


def _mean(values: list[Any]) -> list[Any]:
    """The mean of each rank's tensors; None counts as zero, unless all are None."""
    result = []
    for value in values:
        shapes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shapes, None if value is None else (tuple(value.shape), value.dtype))
        known = next((shape for shape in shapes if shape is not None), None)
        if known is None:
            result.append(None)
            continue
        total = torch.zeros(known[0], dtype=known[1]) if value is None else value.detach().clone()
        dist.all_reduce(total)
        result.append(total / dist.get_world_size())
    return result
