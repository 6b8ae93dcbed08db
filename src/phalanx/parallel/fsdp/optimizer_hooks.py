"""Hooks of all optimizers of torch: a step waits until all ranks can bear it, and the wrapper hears of it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...errors import UsageError
from .units import AbsentParameter, Unit

__all__ = ["watch"]


class Sharded(Protocol):
    """The part of an `FSDP` that these hooks need."""

    _units: list[Unit]

    def before_step(self) -> None:
        """An optimizer is about to change the shards."""

    def parameters_changed(self) -> None:
        """It has changed them."""


_OF_WHOLE_MATRICES = ("Adafactor", "LBFGS", "Muon")
"""Optimizers of torch whose step of one element depends on others."""
_watched: weakref.WeakSet[Any] = weakref.WeakSet()


def watch(wrapper: Sharded) -> None:
    """Tells a wrapper of the steps of its optimizers, from now on."""
    _install()
    _watched.add(wrapper)


@functools.cache
def _install() -> None:
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def _of(optimizer: torch.optim.Optimizer) -> Iterator[Sharded]:
    """The wrappers whose shards an optimizer has.

    Raises:
        UsageError: It has a whole parameter instead, which nothing comes of.
    """
    if not _watched:
        return
    mine = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    for parameter in mine.values():
        if isinstance(parameter, AbsentParameter):
            raise _refusal(parameter.place_name, "of the module inside")
    for wrapper in list(_watched):
        for place in (place for unit in wrapper._units for place in unit.places):
            inside = [(use, "of the module inside") for use in place.uses]
            for whole, when in [*inside, (place.original(), "made before it was wrapped")]:
                if whole is not None and id(whole) in mine and isinstance(whole, nn.Parameter):
                    raise _refusal(place.name, when)
        if any(id(shard) in mine for unit in wrapper._units for shard in unit.shards):
            _refuse_whole_matrices(optimizer, wrapper)
            yield wrapper


def _refusal(name: str, when: str) -> UsageError:
    return UsageError(
        f"the optimizer has the whole parameter {name!r} of an FSDP ({when}), not this rank's rows of it (make it of "
        "the parameters() of the FSDP itself)"
    )


def _refuse_whole_matrices(optimizer: torch.optim.Optimizer, wrapper: Sharded) -> None:
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _OF_WHOLE_MATRICES and any(unit.ranks > 1 for unit in wrapper._units):
            raise UsageError(
                f"{kind.__name__} computes with whole parameters, of which each rank of an FSDP has some rows (use one "
                "that looks at each element, as AdamW; or px.parallel.DDP, or strategy='none')"
            )


def _before(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    for wrapper in _of(optimizer):
        wrapper.before_step()


def _after(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    for wrapper in _of(optimizer):
        wrapper.parameters_changed()
