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
        """The state of each parameter: its `rows` (tensors of its shape) and `values`. The options of all groups."""
        state: dict[str, Any] = {}
        groups = []
        for group in self._optimizer.param_groups:
            options = {key: value for key, value in group.items() if key != "params"}
            names = []
            for shard in group["params"]:
                name, _, to_shard = self._place(shard)
                names.append(name)
                found = self._optimizer.state.get(shard, {})
                state[name] = {
                    "rows": {key: to_shard(value) for key, value in found.items() if _has_rows(value, shard)},
                    "values": {key: value for key, value in found.items() if not _has_rows(value, shard)},
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
                rows = {key: _own(value, shard, first) for key, value in found[name]["rows"].items()}
                self._optimizer.state[shard] = {**rows, **found[name]["values"]}

    def _place(self, shard: torch.Tensor) -> tuple[str, int, ToShard]:
        place = self._places.get(id(shard))
        if place is None:
            raise UsageError("the optimizer has parameters that are not the FSDP's (make it of model.parameters())")
        return place


def _has_rows(value: Any, shard: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == shard.shape


def _own(value: Any, shard: torch.Tensor, first: int) -> torch.Tensor:
    """This rank's rows of a tensor that was saved."""
    if isinstance(value, Shard):
        found: torch.Tensor = value.array
        return found
    whole = value if value.dim() else value.view(1)
    return whole[first : first + shard.shape[0]].clone()
