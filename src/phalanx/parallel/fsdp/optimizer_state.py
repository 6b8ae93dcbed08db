"""The state of an optimizer of shards, by the names of the parameters: so that other numbers of ranks can load it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...checkpoint import Shard
from ...errors import UsageError

__all__ = ["OptimizerState"]

ToShard = Callable[[torch.Tensor], Any]


class OptimizerState:
    """Gives and takes the state of an optimizer, as `px.checkpoint` asks for it.

    Args:
        optimizer: Made of the parameters of an `FSDP`.
        places: For each shard, by its identity: the parameter's name, its first row, and what makes a part of a tensor
            of the same rows.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, places: Mapping[int, tuple[str, int, ToShard]]) -> None:
        self._optimizer = optimizer
        self._places = places

    def state_dict(self) -> dict[str, Any]:
        """For each parameter its state, with tensors of its shape as shards; and the options of each group."""
        state: dict[str, Any] = {}
        groups = []
        for group in self._optimizer.param_groups:
            options = {key: value for key, value in group.items() if key != "params"}
            names = []
            for shard in group["params"]:
                name, _, to_shard = self._place(shard)
                names.append(name)
                state[name] = {
                    key: to_shard(value) if _has_rows(value, shard) else value
                    for key, value in self._optimizer.state.get(shard, {}).items()
                }
            groups.append({**options, "params": names})
        return {"state": state, "groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes what `state_dict` gave, on any number of ranks.

        Raises:
            UsageError: It is of other parameters.
        """
        found = state_dict["state"]
        for group, saved in zip(self._optimizer.param_groups, state_dict["groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
            for shard in group["params"]:
                name, first, _ = self._place(shard)
                if name not in found:
                    raise UsageError(f"the optimizer's state has no {name}")
                self._optimizer.state[shard] = {key: _own(value, shard, first) for key, value in found[name].items()}

    def _place(self, shard: torch.Tensor) -> tuple[str, int, ToShard]:
        place = self._places.get(id(shard))
        if place is None:
            raise UsageError("the optimizer has parameters that are not the FSDP's (make it of model.parameters())")
        return place


def _has_rows(value: Any, shard: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == shard.shape


def _own(value: Any, shard: torch.Tensor, first: int) -> Any:
    """This rank's rows of a saved tensor; anything else as it is."""
    if isinstance(value, Shard):
        return value.array
    if isinstance(value, torch.Tensor) and value.dim() and value.shape[1:] == shard.shape[1:]:
        return value[first : first + shard.shape[0]].clone()
    return value
