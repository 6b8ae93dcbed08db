"""torch's FSDP1 and FSDP2: each rank has a piece of every parameter."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from .common import Part, digest, mlp, parameters, train

CPU = torch.device("cpu")


def _fsdp1(**options: Any) -> Any:
    module = FullyShardedDataParallel(mlp(), auto_wrap_policy=ModuleWrapPolicy([nn.Linear]), device_id=CPU, **options)
    losses = train(module)
    with FullyShardedDataParallel.state_dict_type(
        module, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)
    ):
        state = module.state_dict()
    return [losses, parameters(module), digest(state[name] for name in sorted(state))]


def fsdp1() -> Any:
    return _fsdp1()


def fsdp1_of_gradients_only() -> Any:
    return _fsdp1(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)


def fsdp1_with_the_user_s_parameters() -> Any:
    return _fsdp1(use_orig_params=True)


def fsdp1_in_float16() -> Any:
    return _fsdp1(mixed_precision=MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float16))


def fsdp1_clipped() -> Any:
    module = FullyShardedDataParallel(mlp(), device_id=CPU)
    module(torch.full((4, 16), 1.0 + dist.get_rank())).sum().backward()
    return float(module.clip_grad_norm_(0.5))


def _fsdp2(**options: Any) -> Any:
    module = mlp()
    for layer in module:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    fully_shard(module, **options)
    losses = train(module)
    whole = digest(parameter.full_tensor() for parameter in module.parameters())
    return [losses, parameters(module), whole]


def fsdp2() -> Any:
    return _fsdp2()


def fsdp2_kept_after_forward() -> Any:
    return _fsdp2(reshard_after_forward=False)


def fsdp2_reduced_in_float32_of_bfloat16() -> Any:
    return _fsdp2(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def fsdp2_with_offload() -> Any:
    return _fsdp2(offload_policy=CPUOffloadPolicy(pin_memory=False))


def fsdp2_of_odd_shapes() -> Any:
    torch.manual_seed(0)
    module = fully_shard(nn.Sequential(nn.Linear(16, 5), nn.Linear(5, 3)))
    return [train(module), parameters(module)]


def fsdp2_clipped_and_accumulated() -> Any:
    module = mlp()
    fully_shard(module[0])
    fully_shard(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    norms = []
    for step in range(4):
        module.set_requires_gradient_sync(step % 2 == 1)
        module(torch.full((4, 16), 1.0 + dist.get_rank() + step)).sum().backward()
        if step % 2:
            norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.5).full_tensor()))
            optimizer.step()
            optimizer.zero_grad()
    return [norms, parameters(module)]


def fsdp2_in_memory_of_the_group() -> Any:
    module = mlp()
    fully_shard(module[0])
    fully_shard(module)
    module.set_allocate_memory_from_process_group_for_comm(True)
    return [train(module), parameters(module)]


def fsdp2_on_two_axes() -> Any:
    """Replicas of shards: half of the ranks have the whole model among them."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replica", "shard"))
    return _fsdp2(mesh=mesh)


PARTS: list[Part] = [
    fsdp1,
    fsdp1_of_gradients_only,
    fsdp1_with_the_user_s_parameters,
    fsdp1_in_float16,
    fsdp1_clipped,
    fsdp2,
    fsdp2_kept_after_forward,
    fsdp2_reduced_in_float32_of_bfloat16,
    fsdp2_with_offload,
    fsdp2_of_odd_shapes,
    fsdp2_clipped_and_accumulated,
    fsdp2_in_memory_of_the_group,
    fsdp2_on_two_axes,
]
