"""Ways to train, each run twice on the ranks of one world: with `px.parallel.DDP`, and with what says how it should end.

A case gets a `Trial`, trains a little, and returns tensors. Where torch's own wrapper can do it, its results on Gloo are
the measure. Where it cannot, or would leave the ranks with different gradients, the measure is the mean over all ranks
of what each computes for itself: such a case returns gradients, which are linear in those of the ranks.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo  # torch's wrapper needs it: so it is there before the ranks are forked
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import phalanx as px

__all__ = ["CASES", "run"]


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


# -- models and steps --------------------------------------------------------------------------------------------------


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


class Boom(torch.autograd.Function):  # type: ignore[misc]
    """Passes values on; raises in backward if told to."""

    @staticmethod
    def forward(ctx: Any, x: Any, armed: bool) -> Any:
        ctx.armed = armed
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if ctx.armed:
            raise ValueError("boom")
        return grad, None


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


# -- modes -------------------------------------------------------------------------------------------------------------


def train(t: Trial, module: Any, *, steps: int = 3, none: bool = True, eval_mode: bool = False, **options: Any) -> Any:
    model = t.wrap(module, **options)
    if eval_mode:
        model.eval()
    for index in range(steps):
        model.zero_grad(set_to_none=none)
        model(t.x(index)).square().sum().backward()
        step(model)
    return state(model), grads(model)


case("training")(lambda t: train(t, mlp()))
case("training, gradients zeroed")(lambda t: train(t, mlp(), none=False))
case("training, many buckets")(lambda t: train(t, mlp(), bucket_bytes=64))
case("evaluation mode")(lambda t: train(t, mlp(), eval_mode=True))
case("evaluation mode, many buckets")(lambda t: train(t, mlp(), eval_mode=True, bucket_bytes=64))
case("normalisation in evaluation mode")(
    lambda t: train(t, seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))), eval_mode=True)
)


@case(equal=False)
def buffers(t: Trial) -> Any:
    """Of which rank they are, after forwards of all kinds."""
    model = t.wrap(seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))))
    seen = []
    for index, kind in enumerate(
        ["train", "no_sync", "no_sync", "train", "train", "no_grad", "no_grad", "train", "eval", "eval"]
    ):
        model.train(kind not in ("no_grad", "eval"))
        with model.no_sync() if kind == "no_sync" else contextlib.nullcontext():
            with torch.no_grad() if kind == "no_grad" else contextlib.nullcontext():
                out = model(t.x(index))
            if kind != "no_grad":
                out.square().sum().backward()
        seen += [out.detach().clone(), *state(model)]
    return seen


# -- checkpointing -----------------------------------------------------------------------------------------------------


def checkpointed(t: Trial, which: set[int], reentrant: bool, **options: Any) -> Any:
    def around(index: int, block: Any, x: Any) -> Any:
        return checkpoint(block, x, use_reentrant=reentrant) if index in which else block(x)

    model = t.wrap(Blocks(around), **options)
    for index in range(3):
        model.zero_grad()
        model(t.x(index).requires_grad_()).square().sum().backward()
        step(model)
    return state(model), grads(model)


for reentrant in (True, False):
    for words, which in {"first": {0}, "middle": {1}, "last": {2}, "every": {0, 1, 2}}.items():
        name = f"{words} block checkpointed, reentrant={reentrant}"
        case(name)(functools.partial(checkpointed, which=which, reentrant=reentrant))
        case(f"{name}, many buckets")(
            functools.partial(checkpointed, which=which, reentrant=reentrant, bucket_bytes=16)
        )


def nested(t: Trial, reentrant: bool) -> Any:
    again = functools.partial(checkpoint, use_reentrant=reentrant)
    model = t.wrap(Blocks(lambda index, block, x: again(lambda y: again(block, y), x)), bucket_bytes=16)
    model(t.x().requires_grad_()).square().sum().backward()
    return grads(model)


case("checkpoint in a checkpoint, reentrant=True")(functools.partial(nested, reentrant=True))
case("checkpoint in a checkpoint, reentrant=False")(functools.partial(nested, reentrant=False))


def shared_by_checkpoints(t: Trial, reentrant: bool) -> Any:
    """One block, used three times: as it is, and in two backwards inside the backward."""
    block = seeded(lambda: nn.Linear(4, 4))

    def call(self: Any, x: Any) -> Any:
        x = checkpoint(self.block, torch.tanh(self.first(x)), use_reentrant=reentrant)
        return self.block(checkpoint(self.block, torch.tanh(x), use_reentrant=reentrant))

    model = t.wrap(Made(call, first=seeded(lambda: nn.Linear(4, 4)), block=block), bucket_bytes=16)
    found = []
    for index in range(3):
        model.zero_grad()
        model(t.x(index)).square().sum().backward()
        found += grads(model)
    return found


right("a block in several checkpoints, reentrant=True")(functools.partial(shared_by_checkpoints, reentrant=True))
right("a block in several checkpoints, reentrant=False")(functools.partial(shared_by_checkpoints, reentrant=False))


@right()
def checkpointed_and_unused(t: Trial) -> Any:
    def call(self: Any, x: Any) -> Any:
        return checkpoint(self.b, torch.tanh(self.a(x)), use_reentrant=True)

    parts = {name: seeded(lambda: nn.Linear(4, 4)) for name in ("a", "b", "unused")}
    model = t.wrap(Made(call, **parts), find_unused_parameters=True)
    model(t.x()).square().sum().backward()
    return grads(model)


@right()
def wrapper_inside_a_checkpoint(t: Trial) -> Any:
    model = t.wrap(mlp())
    checkpoint(model, t.x().requires_grad_(), use_reentrant=True).square().sum().backward()
    return grads(model)


@right()
def wrapper_twice_in_a_checkpoint(t: Trial) -> Any:
    model = t.wrap(seeded(lambda: nn.Linear(4, 4)))
    model(torch.tanh(checkpoint(model, t.x().requires_grad_(), use_reentrant=True))).square().sum().backward()
    return grads(model)


# -- exceptions --------------------------------------------------------------------------------------------------------


def caught(t: Trial, where: dict[int, int], bucket_bytes: int, none: bool) -> Any:
    """Every other backward raises after some blocks, on some ranks; all go on with the next step."""
    place = where.get(t.rank, where.get(-1))
    broken = False

    def around(index: int, block: Any, x: Any) -> Any:
        # Backward passes here after the blocks behind, and before this one.
        return block(Boom.apply(x, broken and index == place))

    model = t.wrap(Blocks(around), bucket_bytes=bucket_bytes)
    found, kept = [], []
    for index in range(6):
        model.zero_grad(set_to_none=none)
        broken = index % 2 == 0
        try:
            model(t.x(index).requires_grad_()).square().sum().backward()
        except (ValueError, px.Desync) as error:
            kept.append(error)
            continue
        if index % 2:
            found += grads(model)
    if t.ours:
        assert len(kept) == 3, kept
        assert all(isinstance(error, ValueError if place is not None else px.Desync) for error in kept), kept
    return found


for words, where in {
    "on all ranks, first": {-1: 2},
    "on all ranks, in the middle": {-1: 1},
    "on all ranks, last": {-1: 0},
    "on rank 1, first": {1: 2},
    "on rank 1, in the middle": {1: 1},
    "on rank 1, last": {1: 0},
    "at different places": {0: 2, -1: 0},
}.items():
    right(f"backward raises {words}")(functools.partial(caught, where=where, bucket_bytes=16, none=True))
    right(f"backward raises {words}, one bucket")(
        functools.partial(caught, where=where, bucket_bytes=1 << 20, none=False)
    )


@right()
def backward_raises_and_the_same_graph_is_tried_again(t: Trial) -> Any:
    class Once(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            calls.append(1)
            if len(calls) == 1:
                raise ValueError("once")
            return grad

    calls: list[int] = []
    model = t.wrap(Blocks(lambda index, block, x: block(Once.apply(x) if index == 1 else x)), bucket_bytes=16)
    loss = model(t.x()).square().sum()
    with contextlib.suppress(ValueError):
        loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    return grads(model)


@right()
def forward_raises_on_one_rank_which_tries_again(t: Trial) -> Any:
    def around(index: int, block: Any, x: Any) -> Any:
        if failing and index == 1:
            raise ValueError("bad batch")
        return block(x)

    model = t.wrap(Blocks(around))
    found = []
    for index in range(3):
        model.zero_grad()
        failing = t.rank == 1 and index == 1
        with contextlib.suppress(ValueError):
            model(t.x(7))
        failing = False
        model(t.x(index)).square().sum().backward()
        found += grads(model)
    return found


# -- parameters --------------------------------------------------------------------------------------------------------


@case()
def a_parameter_used_twice(t: Trial) -> Any:
    return train(t, Made(lambda self, x: self.a(torch.tanh(self.a(x))), a=seeded(lambda: nn.Linear(4, 4))))


@case()
def tied_weights(t: Trial) -> Any:
    a, b = seeded(lambda: (nn.Linear(4, 4), nn.Linear(4, 4)))
    b.weight = a.weight
    return train(t, Made(lambda self, x: self.b(torch.tanh(self.a(x))), a=a, b=b), bucket_bytes=16)


def forked() -> Any:
    parts = {name: seeded(lambda: nn.Linear(4, 4)) for name in "abc"}
    return Made(lambda self, x, which: getattr(self, which)(x), **parts)


@case()
def unused_here_and_there(t: Trial) -> Any:
    model = t.wrap(forked(), find_unused_parameters=True)
    found = []
    for index in range(3):
        model.zero_grad()
        model(t.x(index), "ab"[(t.rank + index) % 2]).square().sum().backward()
        found += grads(model)
        step(model)
    return found, state(model)


@right()
def unused_after_no_sync(t: Trial) -> Any:
    """What was added up counts, although this backward does not come there."""
    model = t.wrap(forked(), find_unused_parameters=True)
    with model.no_sync():
        model(t.x(0), "a").sum().backward()
    model(t.x(1), "b").sum().backward()
    return grads(model)


@right()
def frozen_later(t: Trial) -> Any:
    module = mlp()
    model = t.wrap(module, bucket_bytes=64)
    found = []
    for index in range(3):
        model.zero_grad()
        module[2].weight.requires_grad_(index != 1)
        model(t.x(index)).square().sum().backward()
        found += grads(model)
    return found


@right()
def unfrozen_later(t: Trial) -> Any:
    module = mlp()
    module[0].requires_grad_(False)
    model = t.wrap(module)
    found = []
    for index in range(3):
        model.zero_grad()
        module[0].requires_grad_(index > 0)
        module[2].requires_grad_(index != 1)
        model(t.x(index)).square().sum().backward()
        found += grads(model)
    return found


@right()
def all_frozen_for_a_while(t: Trial) -> Any:
    """As a discriminator while the generator is trained."""
    module = mlp()
    model = t.wrap(module)
    found = []
    for frozen in (True, False, True, False):
        model.zero_grad()
        module.requires_grad_(not frozen)
        model(t.x().requires_grad_()).square().sum().backward()
        found += grads(model)
    return found


@right()
def another_dtype_later(t: Trial) -> Any:
    model = t.wrap(mlp())
    model(t.x()).sum().backward()
    model.double().zero_grad()
    model(t.x().double()).sum().backward()
    return grads(model)


@right()
def a_new_parameter_later(t: Trial) -> Any:
    module = mlp()
    model = t.wrap(module)
    model(t.x()).sum().backward()
    module[4] = seeded(lambda: nn.Linear(8, 3))
    model.zero_grad()
    model(t.x()).sum().backward()
    return grads(model)


@case()
def strides_of_all_kinds(t: Trial) -> Any:
    conv = seeded(lambda: nn.Conv2d(2, 3, 2)).to(memory_format=torch.channels_last)
    turned = seeded(lambda: nn.Parameter(torch.randn(3, 12).t()))
    model = t.wrap(Made(lambda self, x: self.conv(x).flatten(1) @ self.turned, conv=conv, turned=turned))
    found = []
    for index in range(2):
        model.zero_grad()
        model(t.x(index, 2, 2, 3, 3)).square().sum().backward()
        found += grads(model)
    return found, [grad.stride() for grad in found]


@right()
def a_parameter_without_elements(t: Trial) -> Any:
    nothing = nn.Parameter(torch.empty(0, 3))
    model = t.wrap(
        Made(lambda self, x: self.a(x) + self.nothing.sum(), a=seeded(lambda: nn.Linear(4, 1)), nothing=nothing)
    )
    model(t.x()).sum().backward()
    return grads(model)


def _mixed(dtypes: list[torch.dtype]) -> Any:
    parts = {f"l{i}": seeded(lambda: nn.Linear(4, 4)).to(dtype) for i, dtype in enumerate(dtypes)}

    def call(self: Any, x: Any) -> Any:
        for part in (self.l0, self.l1, self.l2):
            x = torch.tanh(part(x.to(part.weight.dtype)))
        return x

    return Made(call, **parts)


for dtypes in (
    [torch.float32, torch.float64, torch.bfloat16],
    [torch.float16, torch.float32, torch.float32],
    [torch.complex64, torch.complex128, torch.complex64],
):
    case(f"{', '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)}")(
        lambda t, dtypes=dtypes: _of_dtypes(t, dtypes)
    )


def _of_dtypes(t: Trial, dtypes: list[torch.dtype]) -> Any:
    model = t.wrap(_mixed(dtypes), bucket_bytes=16)
    model(t.x()).abs().float().square().sum().backward()
    return grads(model)


@case()
def float16_that_would_overflow_as_a_sum(t: Trial) -> Any:
    model = t.wrap(nn.Linear(1, 1, bias=False).to(torch.float16))
    (model(torch.ones(1, 1, dtype=torch.float16)) * 40000).sum().backward()
    return grads(model)


# -- backwards ---------------------------------------------------------------------------------------------------------


@right()
def two_backwards_on_one_forward(t: Trial) -> Any:
    model = t.wrap(mlp(), bucket_bytes=64)
    loss = model(t.x()).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return grads(model)


@right()
def two_forwards_then_two_backwards(t: Trial) -> Any:
    model = t.wrap(mlp(), bucket_bytes=64)
    losses = [model(t.x(index)).square().sum() for index in range(2)]
    for loss in losses:
        loss.backward()
    return grads(model)


@right()
def two_forwards_then_one_backward(t: Trial) -> Any:
    model = t.wrap(mlp(), bucket_bytes=64)
    (model(t.x(0)).sum() * model(t.x(1)).sum()).backward()
    return grads(model)


def _two_heads() -> Any:
    def call(self: Any, x: Any) -> Any:
        x = torch.tanh(self.body(x))
        return {"a": self.a(x), "rest": [self.b(x), None, "text"]}

    return Made(call, **{name: seeded(lambda: nn.Linear(4, 4)) for name in ("body", "a", "b")})


@right()
def backward_through_some_outputs(t: Trial) -> Any:
    model = t.wrap(_two_heads(), find_unused_parameters=True)
    model(t.x())["a"].sum().backward()
    first = grads(model)
    out = model(t.x(1))
    out["rest"][0].sum().backward(retain_graph=True)
    out["a"].sum().backward()
    return first, grads(model)


@right()
def backward_to_some_inputs(t: Trial) -> Any:
    module = mlp()
    model = t.wrap(module, find_unused_parameters=True)
    model(t.x()).sum().backward(inputs=[module[4].weight, module[0].bias])
    return grads(model)


@case()
def gradient_penalty(t: Trial) -> Any:
    model = t.wrap(mlp(), bucket_bytes=64)
    found = []
    for index in range(2):
        model.zero_grad()
        x = t.x(index).requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (out.square().sum() + slope.square().sum()).backward()
        found += grads(model)
    return found


@right()
def backward_that_makes_a_graph(t: Trial) -> Any:
    model = t.wrap(mlp())
    with _quiet():
        model(t.x()).square().sum().backward(create_graph=True)
    return grads(model)


@right()
def gradients_of_autograd_grad_are_not_touched(t: Trial) -> Any:
    model = t.wrap(mlp())
    found = torch.autograd.grad(model(t.x()).sum(), list(model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert len(found) == 6
    model(t.x(1)).sum().backward()
    return grads(model)


@right()
def backward_in_another_thread(t: Trial) -> Any:
    model = t.wrap(mlp())
    thread = threading.Thread(target=model(t.x()).sum().backward)
    thread.start()
    thread.join()
    return grads(model)


@case(equal=False)
def the_module_itself_is_not_averaged(t: Trial) -> Any:
    model = t.wrap(mlp())
    model(t.x()).sum().backward()
    model.zero_grad()
    model.module(t.x()).sum().backward()
    return grads(model)


# -- outputs -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Output:
    value: Any
    note: str = ""


class Odd:
    """An output of a class that nobody knows, and that leads back to itself."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.me = self


for kind in (Output, Odd):

    @right(f"an output of class {kind.__name__}, reentrant")
    def _of_class(t: Trial, kind: Any = kind) -> Any:
        def call(self: Any, x: Any) -> Any:
            return kind(checkpoint(self.b, torch.tanh(self.a(x)), use_reentrant=True))

        model = t.wrap(Made(call, a=seeded(lambda: nn.Linear(4, 4)), b=seeded(lambda: nn.Linear(4, 4))))
        model(t.x()).value.square().sum().backward()
        return grads(model)


@right()
def a_loss_that_is_an_attribute(t: Trial) -> Any:
    def call(self: Any, x: Any) -> Any:
        out = self.a(x)
        self.extra = self.b(x).square().sum()
        return out

    module = Made(call, a=seeded(lambda: nn.Linear(4, 4)), b=seeded(lambda: nn.Linear(4, 4)))
    model = t.wrap(module, bucket_bytes=16)
    (model(t.x()).square().sum() + module.extra).backward()
    return grads(model)


@right()
def only_an_attribute(t: Trial) -> Any:
    def call(self: Any, x: Any) -> None:
        self.loss = self.a(x).square().sum()

    module = Made(call, a=seeded(lambda: nn.Linear(4, 4)))
    model = t.wrap(module)
    model(t.x())
    module.loss.backward()
    return grads(model)


@case()
def output_changed_in_place(t: Trial) -> Any:
    model = t.wrap(mlp())
    out = model(t.x())
    out.mul_(2)
    out.square().sum().backward()
    return grads(model)


# -- accumulation ------------------------------------------------------------------------------------------------------


@case()
def accumulation(t: Trial) -> Any:
    model = t.wrap(mlp(), bucket_bytes=64)
    for index in range(6):
        with model.no_sync() if index % 3 < 2 else contextlib.nullcontext():
            model(t.x(index)).square().sum().backward()
        if index % 3 == 2:
            step(model)
            model.zero_grad(set_to_none=index == 2)
    return state(model), grads(model)


@case()
def accumulation_without_no_sync(t: Trial) -> Any:
    model = t.wrap(mlp())
    for index in range(3):
        model(t.x(index)).square().sum().backward()
    return grads(model)


@case()
def forward_outside_and_backward_inside_no_sync(t: Trial) -> Any:
    model = t.wrap(mlp())
    loss = model(t.x()).sum()
    with model.no_sync():
        loss.backward()
    return grads(model)


@case(equal=False)
def forward_inside_and_backward_outside_no_sync(t: Trial) -> Any:
    model = t.wrap(mlp())
    with model.no_sync():
        loss = model(t.x()).sum()
    loss.backward()
    return grads(model)


# -- what programs do to gradients -------------------------------------------------------------------------------------


@case()
def gradients_replaced(t: Trial) -> Any:
    model = t.wrap(mlp())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(t.rank))
    model(t.x()).sum().backward()
    return grads(model)


@case()
def gradients_dropped_after_forward(t: Trial) -> Any:
    model = t.wrap(mlp(), bucket_bytes=64)
    model(t.x()).sum().backward()
    loss = model(t.x(1)).sum()
    model.zero_grad(set_to_none=True)
    loss.backward()
    return grads(model)


@case()
def gradients_kept_by_the_program(t: Trial) -> Any:
    """Those of one step are not changed by the next."""
    model = t.wrap(mlp())
    model(t.x()).sum().backward()
    kept = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    model(t.x(1)).sum().backward()
    return kept, grads(model)


def _scale(factor: float, parameter: Any) -> None:
    parameter.grad.mul_(factor)


@case()
def hooks_of_the_program(t: Trial) -> Any:
    """They see this rank's gradients, and what they make of them is averaged."""
    module = mlp()
    seen = []
    module[0].weight.register_hook(lambda grad: grad * (t.rank + 1))
    before = module[2].weight.register_post_accumulate_grad_hook(functools.partial(_scale, 3 + t.rank))
    model = t.wrap(module)
    module[4].weight.register_post_accumulate_grad_hook(functools.partial(_scale, 0.5))
    module.register_full_backward_hook(lambda *_: seen.append(1))
    for _ in range(2):
        model(t.x()).sum().backward()
    before.remove()
    return grads(model), [torch.tensor(len(seen))]


@right()
def a_parameter_that_gets_an_undefined_gradient(t: Trial) -> Any:
    class Without(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad, None

    model = t.wrap(
        Made(
            lambda self, x: Without.apply(self.a(x), self.w),
            a=seeded(lambda: nn.Linear(4, 4)),
            w=nn.Parameter(torch.ones(2)),
        )
    )
    model(t.x()).sum().backward()
    return [grad if grad is not None else torch.zeros(2) for grad in grads(model)]


# -- ranks with different numbers of batches ---------------------------------------------------------------------------


def joining(t: Trial, module: Any, pause: bool = False, **options: Any) -> Any:
    model = t.wrap(module, **options)
    with model.join():
        for index in range(2 * (t.size - t.rank)):
            with model.no_sync() if pause and index % 2 == 0 else contextlib.nullcontext():
                model(t.x(index)).square().sum().backward()
            if not (pause and index % 2 == 0):
                step(model)
                model.zero_grad()
    return state(model)


case("join")(lambda t: joining(t, mlp(), bucket_bytes=64))
case("join, no_sync")(lambda t: joining(t, mlp(), pause=True))
case("join, unused")(lambda t: joining(t, mlp(), find_unused_parameters=True))
case("join, buffers")(lambda t: joining(t, seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))))


# -- the rest ----------------------------------------------------------------------------------------------------------


@case()
def names_of_the_state(t: Trial) -> Any:
    model = t.wrap(mlp())
    other = t.wrap(nn.Sequential(*(type(part)(*_sizes(part)) for part in mlp())))
    other.load_state_dict(model.state_dict())
    return [*model.state_dict(), *(name for name, _ in model.named_parameters())], state(other)


def _sizes(part: Any) -> tuple[int, ...]:
    return (part.in_features, part.out_features) if isinstance(part, nn.Linear) else ()


@right()
def a_copy_trains_for_itself(t: Trial) -> Any:
    model = t.wrap(mlp())
    model(t.x()).sum().backward()
    other = copy.deepcopy(model)
    other.zero_grad()
    other(t.x(1)).sum().backward()
    return grads(model), grads(other)


@case()
def autocast(t: Trial) -> Any:
    model = t.wrap(mlp())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(t.x()).float().square().sum()
    loss.backward()
    return grads(model)


@right()
def wrapper_that_is_gone(t: Trial) -> Any:
    """The output keeps what it needs."""
    module = mlp()
    t.wrap(module)(t.x()).sum().backward()
    return grads(module)


@right()
def two_wrappers_around_one_module(t: Trial) -> Any:
    module = mlp()
    first, second = t.wrap(module), t.wrap(module)
    first(t.x()).sum().backward()
    second(t.x(1)).sum().backward()
    return grads(module)


@right()
def two_wrappers_in_one_graph(t: Trial) -> Any:
    a, b = (t.wrap(seeded(lambda: nn.Linear(4, 4)), bucket_bytes=16) for _ in range(2))
    b(torch.tanh(a(t.x()))).sum().backward()
    return grads(a), grads(b)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# -- running them ------------------------------------------------------------------------------------------------------


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

    with _quiet():
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
