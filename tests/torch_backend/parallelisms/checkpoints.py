"""Distributed checkpoints: saved by all ranks, and loaded by as many, or by fewer, or otherwise cut."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from .common import Part, digest, mlp, parameters, train


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """One that all ranks share."""
    with tempfile.TemporaryDirectory() as mine:
        names = [str(Path(mine) / "state")]
        dist.broadcast_object_list(names)
        yield names[0]
        dist.barrier()


def plain() -> Any:
    tensor = torch.full((3,), 5.0)
    with _folder() as folder:
        dcp.save({"a": tensor, "step": 7}, checkpoint_id=folder)
        state = {"a": torch.zeros(3), "step": 0}
        dcp.load(state, checkpoint_id=folder)
    return [digest([state["a"]]), state["step"]]


def asynchronous() -> Any:
    tensor = torch.full((3,), 5.0)
    with _folder() as folder:
        dcp.async_save({"a": tensor}, checkpoint_id=folder, process_group=dist.new_group()).result()
        state = {"a": torch.zeros(3)}
        dcp.load(state, checkpoint_id=folder)
    return digest([state["a"]])


def training_goes_on() -> Any:
    """A sharded model and its optimizer, saved and loaded into new ones: the same losses as without."""
    module = fully_shard(mlp())
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    train(module, optimizer=optimizer)
    with _folder() as folder:
        model_state, optimizer_state = get_state_dict(module, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
        loaded = fully_shard(mlp())
        loaded_optimizer = torch.optim.Adam(loaded.parameters(), lr=0.01)
        model_state, optimizer_state = get_state_dict(loaded, loaded_optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(loaded, loaded_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    losses = [train(module, optimizer=optimizer), train(loaded, optimizer=loaded_optimizer)]
    assert losses[0] == losses[1]
    return [losses, parameters(loaded)]


def otherwise_cut() -> Any:
    """Saved by rows by all ranks; loaded by columns, by two ranks alone, and by one as a whole."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensor = torch.randn(10, 6)
    found = []
    with _folder() as folder:
        dcp.save({"a": distribute_tensor(tensor, mesh, [Shard(0)])}, checkpoint_id=folder)
        state = {"a": distribute_tensor(torch.zeros(10, 6), mesh, [Shard(1)])}
        dcp.load(state, checkpoint_id=folder)
        found.append(digest([state["a"].full_tensor()]))
        two = dist.new_group([0, 1])
        if dist.get_rank() < 2:
            state = (
                {"a": distribute_tensor(torch.zeros(10, 6), init_device_mesh("cpu", (2,)), [Shard(0)])}
                if (dist.get_world_size() == 2)
                else {"a": torch.zeros(10, 6)}
            )
            dcp.load(state, checkpoint_id=folder, process_group=two)
            found.append(digest([state["a"]]))
        whole = {"a": torch.zeros(10, 6)}
        dcp.load(whole, checkpoint_id=folder, no_dist=True)
        assert torch.equal(whole["a"], tensor)
    return found


def as_a_whole() -> Any:
    """The full state, on rank 0 only, and from there to all ranks."""
    module = fully_shard(mlp())
    train(module)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_model_state_dict(module, options=options)
    fresh = fully_shard(mlp())
    spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(fresh, whole if dist.get_rank() == 0 else {}, options=spread)
    assert parameters(fresh) == parameters(module)
    return [digest(whole[name] for name in sorted(whole)), parameters(fresh)]


PARTS: list[Part] = [plain, asynchronous, training_goes_on, otherwise_cut, as_a_whole]
