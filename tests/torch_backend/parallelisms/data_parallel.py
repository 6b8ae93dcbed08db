"""torch's `DistributedDataParallel`, and what it can be combined with."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    ddp_zero_hook,
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

from .common import Part, mlp, parameters, train

DDP = nn.parallel.DistributedDataParallel


def _trained(module: nn.Module, **options: Any) -> list[Any]:
    return [train(module, **options), parameters(module)]


def plain() -> Any:
    return _trained(DDP(mlp()))


def small_buckets() -> Any:
    return _trained(DDP(mlp(), bucket_cap_mb=0.001))


def gradients_as_views_of_a_static_graph() -> Any:
    return _trained(DDP(mlp(), gradient_as_bucket_view=True, static_graph=True))


def no_sync() -> Any:
    module = DDP(mlp())
    x = torch.full((4, 16), 1.0 + dist.get_rank())
    with module.no_sync():
        module(x).sum().backward()
    module(2 * x).sum().backward()
    return [float(parameter.grad.sum()) for parameter in module.parameters()]


class Forked(nn.Module):
    """Uses only a part of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(16, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.branches[dist.get_rank() % 2](x)


def unused_parameters() -> Any:
    torch.manual_seed(0)
    return _trained(DDP(Forked(), find_unused_parameters=True))


def buffers() -> Any:
    torch.manual_seed(0)
    return _trained(DDP(nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))))


def synchronous_batch_norm() -> Any:
    """torch has it for GPUs only; it says so in the same words whatever the backend."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    try:
        return _trained(DDP(nn.SyncBatchNorm.convert_sync_batchnorm(module)))
    except ValueError as error:
        return str(error)


def sparse_gradients() -> Any:
    torch.manual_seed(0)
    module = DDP(nn.EmbeddingBag(10, 4, sparse=True, mode="sum"))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses, rank = [], dist.get_rank()
    for step in range(4):
        optimizer.zero_grad()
        loss = module(torch.tensor([[rank, step], [3, 2 * rank]])).pow(2).sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return [losses, parameters(module)]


def mixed_dtypes() -> Any:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16), nn.Linear(16, 16).double(), nn.Linear(16, 4).bfloat16()]

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(layers)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x.to(layer.weight.dtype))
            return x.float()

    return _trained(DDP(Mixed()))


def uneven_inputs() -> Any:
    module = DDP(mlp())
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
    with Join([module, optimizer]):
        losses = train(module, optimizer=optimizer, steps=2 + dist.get_rank())
    return [losses, parameters(module)]


def hook_all_reduce() -> Any:
    module = DDP(mlp())
    module.register_comm_hook(None, default_hooks.allreduce_hook)
    return _trained(module)


def hook_float16() -> Any:
    module = DDP(mlp(), gradient_as_bucket_view=True)
    module.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return _trained(module)


def hook_wrapped() -> Any:
    module = DDP(mlp())
    module.register_comm_hook(None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))
    return _trained(module)


def hook_noop() -> Any:
    module = DDP(mlp())
    module.register_comm_hook(None, debugging_hooks.noop_hook)
    return _trained(module)


def hook_power_sgd() -> Any:
    module = DDP(mlp())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return _trained(module, steps=6)


def post_local_sgd() -> Any:
    module = DDP(mlp())
    state = post_localSGD_hook.PostLocalSGDState(
        process_group=None, subgroup=dist.new_subgroups(2)[0], start_localSGD_iter=2
    )
    module.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.1), PeriodicModelAverager(period=2, warmup_steps=2)
    )
    return _trained(module, optimizer=optimizer, steps=6)


def zero_redundancy() -> Any:
    module = DDP(mlp())
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adam, lr=0.01)
    result = _trained(module, optimizer=optimizer)
    optimizer.consolidate_state_dict(0)
    if dist.get_rank() == 0:
        state = optimizer.state_dict()["state"]
        result.append(float(sum(entry["exp_avg"].abs().sum() for entry in state.values())))
    return result


def zero_redundancy_in_backward() -> Any:
    """torch refuses it on Gloo, by name, where it may hang. The first steps only look."""
    module = DDP(mlp(), bucket_cap_mb=0.001, gradient_as_bucket_view=True, static_graph=True)
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    module.register_comm_hook(None, ddp_zero_hook.hook_with_zero_step(default_hooks.allreduce_hook, module, optimizer))
    return _trained(module, optimizer=optimizer)


PARTS: list[Part] = [
    plain,
    small_buckets,
    gradients_as_views_of_a_static_graph,
    no_sync,
    unused_parameters,
    buffers,
    synchronous_batch_norm,
    sparse_gradients,
    mixed_dtypes,
    uneven_inputs,
    hook_all_reduce,
    hook_float16,
    hook_wrapped,
    hook_noop,
    hook_power_sgd,
    post_local_sgd,
    zero_redundancy,
    zero_redundancy_in_backward,
]
