"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ..errors import UsageError
from ..group import Group

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):  # type: ignore[misc]
    """Batch normalisation whose mean and variance are those of the batches of all ranks together.

    Any number of dims, the second being the features. Batches may have different sizes, also none at all. A forward and
    a backward are one collective each, so all ranks make both, in the same order as their other collectives. In
    evaluation mode nothing is sent. The gradients of weight and bias are those of this rank's batch, as in torch: `DDP`
    averages them.

    Args:
        features: The length of the second dim.
        group: The ranks.
        eps: Added to the variance.
        momentum: The share of a new batch in the running statistics; None for the mean of all batches.
        affine: Whether there are weight and bias.
        track_running_stats: Whether there are running statistics, for evaluation. Without them `eval()` takes the
            statistics of this rank's batch alone, as torch's does: an evaluation never communicates.
        timeout: Seconds for each collective; the group's, if not given.
    """

    def __init__(
        self,
        features: int,
        group: Group,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        timeout: float | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        if not isinstance(group, Group):
            raise UsageError(f"group={group!r} is not valid (expected a Group: SyncBatchNorm(features, group=...))")
        super().__init__(features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.group = group
        self._timeout = timeout

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002  (torch's name)
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise UsageError(
                f"an input of shape {tuple(input.shape)} is not valid (expected {self.num_features} features in dim 1)"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  (torch's name)
        """Normalises the input."""
        self._check_input_dim(input)
        if not self.training:
            # As torch's: without running statistics an evaluation takes those of its own batch, and asks nobody.
            mean, variance = self.running_mean, self.running_var
            return functional.batch_norm(input, mean, variance, self.weight, self.bias, mean is None, 0.0, self.eps)
        output, mean, variance, count = _Normalise.apply(
            input, self.weight, self.bias, self.eps, self.group, self._timeout
        )
        if self.training and self.track_running_stats:
            self._update(mean, variance, int(count))
        return output

    def _update(self, mean: torch.Tensor, variance: torch.Tensor, count: int) -> None:
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
            unbiased = variance * (count / (count - 1))
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)

    @classmethod
    def convert(cls, module: nn.Module, group: Group, *, timeout: float | None = None) -> nn.Module:
        """The module with every batch normalisation of torch in it replaced; parameters and statistics are kept.

        Raises:
            UsageError: One of them does not know its features yet.
        """
        made: dict[int, nn.Module] = {}

        def convert(part: nn.Module) -> nn.Module:
            if id(part) not in made:  # the same one may be in several places
                made[id(part)] = part
                if isinstance(part, nn.modules.batchnorm._BatchNorm) and not isinstance(part, cls):
                    made[id(part)] = cls._like(part, group, timeout)
                for name, child in part._modules.items():
                    if child is not None:
                        part._modules[name] = convert(child)
            return made[id(part)]

        return convert(module)

    @classmethod
    def _like(cls, given: Any, group: Group, timeout: float | None) -> SyncBatchNorm:
        if isinstance(given, nn.modules.lazy.LazyModuleMixin) and given.has_uninitialized_params():
            raise UsageError(
                f"a {type(given).__name__} does not know its features yet (call the module once before you convert it)"
            )
        made = cls(
            given.num_features,
            group,
            given.eps,
            given.momentum,
            given.affine,
            given.track_running_stats,
            timeout=timeout,
        )
        made._parameters, made._buffers = given._parameters, given._buffers
        made.training = given.training
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        memo[id(self.group)] = self.group
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__ = copy.deepcopy(self.__dict__, memo)
        return made


class _Normalise(torch.autograd.Function):  # type: ignore[misc]
    """The formulas: one collective on the way forth, one on the way back."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        group: Group,
        timeout: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        values = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        mean, variance, count = _statistics(values, group, timeout)
        if count <= 1:
            raise ValueError(f"expected more than 1 value per feature on all ranks together, got {count}")
        scale = torch.rsqrt(variance + eps).to(values.dtype)
        normal = (values - _spread(mean.to(values.dtype), x)) * _spread(scale, x)
        output = normal if weight is None else normal * _spread(weight.to(values.dtype), x)
        if bias is not None:
            output = output + _spread(bias.to(values.dtype), x)
        ctx.save_for_backward(normal, weight, scale)
        ctx.group, ctx.timeout, ctx.count = group, timeout, count
        ctx.bias_dtype = None if bias is None else bias.dtype
        found = torch.tensor(count)
        ctx.mark_non_differentiable(mean, variance, found)
        return output.to(x.dtype), mean, variance, found

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        normal, weight, scale = ctx.saved_tensors
        incoming = gradient.to(normal.dtype)
        dims = [dim for dim in range(incoming.dim()) if dim != 1]
        sums = torch.stack([incoming.sum(dims), (incoming * normal).sum(dims)])
        of_bias, of_weight = sums.clone()
        ctx.group.all_reduce(sums, timeout=ctx.timeout)
        means = sums / ctx.count
        back = incoming - _spread(means[0], normal) - normal * _spread(means[1], normal)
        factor = scale if weight is None else scale * weight.to(scale.dtype)
        of_input = (back * _spread(factor, normal)).to(gradient.dtype)
        return (
            of_input,
            None if weight is None else of_weight.to(weight.dtype),
            None if ctx.bias_dtype is None else of_bias.to(ctx.bias_dtype),
            *(None, None, None),
        )


def _statistics(x: torch.Tensor, group: Group, timeout: float | None) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Mean and variance of all ranks' values per feature, and how many there are. The same bits on all ranks."""
    features = x.shape[1]
    count = x.numel() // features
    mine = torch.zeros(1 + 2 * features, dtype=torch.float64)
    if count:
        dims = [dim for dim in range(x.dim()) if dim != 1]
        variance, mean = torch.var_mean(x, dims, correction=0)
        mine[0] = count
        mine[1 : features + 1] = mean
        mine[features + 1 :] = variance
    everyone = group.all_gather(mine, timeout=timeout).reshape(group.world_size, -1)
    counts = everyone[:, :1]
    total = int(counts.sum())
    if not total:
        return mine[1 : features + 1], mine[features + 1 :], 0
    means, variances = everyone[:, 1 : features + 1], everyone[:, features + 1 :]
    mean = (counts * means).sum(0) / total
    # The variance inside of the batches, and that of their means: no difference of large numbers.
    variance = (counts * (variances + (means - mean) ** 2)).sum(0) / total
    return mean, variance, total


def _spread(of_features: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A value per feature in the shape of an input."""
    return of_features.view(1, -1, *[1] * (like.dim() - 2))
