"""The table itself, and what its rows are made of."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


class Plain(nn.Module):  # type: ignore[misc]
    """Has the methods of a wrapper, and averages nothing."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module(*args)

    def no_sync(self) -> Any:
        return contextlib.nullcontext()


@dataclasses.dataclass
class Trial:
    """One run of a case on this rank."""

    rank: int
    size: int
    wrap: Callable[..., Any]
    """Wraps a module; options are those of `px.parallel.DDP`."""
    ours: bool

    def x(self, step: int = 0, *shape: int) -> Any:
        """Data of this rank."""
        generator = torch.Generator().manual_seed(100 * step + self.rank)
        return torch.randn(*(shape or (3, 4)), generator=generator)


@dataclasses.dataclass
class Case:
    """A row of the table."""

    train: Callable[[Trial], Any]
    like_torch: bool
    equal: bool
    """Whether all ranks end with the same bits."""


CASES: dict[str, Case] = {}


def case(name: str = "", *, like_torch: bool = True, equal: bool = True) -> Callable[[Any], Any]:
    def add(train: Any) -> Any:
        CASES[name or train.__name__] = Case(train, like_torch, equal)
        return train

    return add


right = functools.partial(case, like_torch=False)
"""A case that torch's wrapper does not get right: the measure is the mean over the ranks."""


def seeded(make: Callable[[], Any]) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return make()


def mlp(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return seeded(
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)
    )


def grads(module: nn.Module) -> list[Any]:
    return [None if p.grad is None else p.grad.detach().clone() for p in module.parameters()]


def state(module: nn.Module) -> list[Any]:
    return [tensor.detach().clone() for tensor in module.state_dict().values()]


@torch.no_grad()  # type: ignore[untyped-decorator]
def step(module: nn.Module) -> None:
    """Plain SGD: torch.optim takes seconds to import."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter -= 0.1 * parameter.grad


class Blocks(nn.Module):  # type: ignore[misc]
    """Three blocks; what `around` does with each is up to the case."""

    def __init__(self, around: Callable[[int, Any, Any], Any]) -> None:
        super().__init__()
        self.blocks = seeded(lambda: nn.ModuleList(nn.Linear(4, 4) for _ in range(3)))
        self.around = around

    def forward(self, x: Any) -> Any:
        for index, block in enumerate(self.blocks):
            x = torch.tanh(self.around(index, block, x))
        return x


class Made(nn.Module):  # type: ignore[misc]
    """A module of some parts and a function."""

    def __init__(self, call: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any) -> Any:
        return self.call(self, *args)


def train(t: Trial, module: Any, *, steps: int = 3, none: bool = True, eval_mode: bool = False, **options: Any) -> Any:
    model = t.wrap(module, **options)
    if eval_mode:
        model.eval()
    for index in range(steps):
        model.zero_grad(set_to_none=none)
        model(t.x(index)).square().sum().backward()
        step(model)
    return state(model), grads(model)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
