"""The stages of a pipeline: given by hand, or cut from an `nn.Sequential`."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from torch import nn

from ...arguments import as_index, shown
from ...errors import UsageError

__all__ = ["SequentialPart", "all_stages", "cut_evenly"]


class SequentialPart(nn.Sequential):  # type: ignore[misc]
    """Some layers of an `nn.Sequential`, under their own names.

    A stage gets a tuple as several arguments; the layers of a Sequential pass it on as one value.
    """

    def forward(self, *values: Any) -> Any:
        """Runs the layers."""
        return super().forward(values[0] if len(values) == 1 else values)


def all_stages(given: Any, ranks: int, per_rank: int | None, cuts: Sequence[int] | None) -> list[nn.Module | None]:
    """All stages in order. None stands for one that another rank has.

    Args:
        given: An `nn.Sequential`, which is cut; or a module for each stage.
        ranks: The number of ranks.
        per_rank: Stages per rank; None for as many as are given, and 1 where a Sequential is cut.
        cuts: Where to cut a Sequential: the index of the first layer of every stage but the first.

    Raises:
        UsageError: There are too few layers, another number of stages, or parameters that two ranks would share.
    """
    if isinstance(given, nn.Sequential):
        stages: list[nn.Module | None] = [*_parts(given, ranks * (per_rank or 1), cuts)]
    else:
        if cuts is not None:
            raise UsageError("cuts= is for an nn.Sequential (the stages are given one by one here)")
        stages = _by_hand(given, ranks, per_rank)
    _refuse_shared(stages, ranks)
    return stages


def cut_evenly(weights: Sequence[int], parts: int) -> list[int]:
    """Where to cut a list into `parts` that are not empty, so that the heaviest is as light as possible.

    Returns:
        The index of the first item of every part but the first.
    """
    sums = [0, *itertools.accumulate(weights)]
    count = len(weights)
    # best[i]: the heaviest part of the first i items, the sum of squares (the more even wins a tie), and the cuts
    best: list[tuple[int, int, list[int]]] = [(sums[end], sums[end] ** 2, []) for end in range(count + 1)]
    for part in range(2, parts + 1):
        for end in range(count, part - 1, -1):
            best[end] = min(
                (max(best[start][0], heavy), best[start][1] + heavy**2, [*best[start][2], start])
                for start in range(part - 1, end)
                for heavy in (sums[end] - sums[start],)
            )
    return best[count][2]


def _parts(model: nn.Sequential, count: int, cuts: Sequence[int] | None) -> list[SequentialPart]:
    layers = list(model._modules.items())  # `named_children` leaves out a layer that is there for the second time
    if len(layers) < count:
        raise UsageError(f"an nn.Sequential of {len(layers)} layers cannot be cut into {count} stages")
    if cuts is None:
        # One more each, so that layers without parameters are spread, too.
        cuts = cut_evenly([1 + sum(each.numel() for each in layer.parameters()) for _, layer in layers], count)
    else:
        cuts = [as_index(cut, "cuts", "indices of layers") for cut in cuts]
        bounds = [0, *cuts, len(layers)]
        if len(cuts) != count - 1 or any(first >= last for first, last in itertools.pairwise(bounds)):
            raise UsageError(
                f"cuts={cuts} is not valid (expected {count - 1} growing indices from 1 to {len(layers) - 1}: the "
                "first layer of every stage but the first)"
            )
    bounds = [0, *cuts, len(layers)]
    made = [SequentialPart(OrderedDict(layers[first:last])) for first, last in itertools.pairwise(bounds)]
    for part in made:
        part.training = model.training
    return made


def _by_hand(given: Any, ranks: int, per_rank: int | None) -> list[nn.Module | None]:
    if isinstance(given, nn.Module) and not isinstance(given, nn.ModuleList):
        raise UsageError(
            f"stages={type(given).__name__}(...) is not valid (expected an nn.Sequential, or a list with a module for "
            "each stage)"
        )
    try:
        stages = list(given)
    except TypeError:
        raise UsageError(
            f"stages={shown(given)} is not valid (expected an nn.Sequential or a list of modules)"
        ) from None
    for stage in stages:
        if stage is not None and not isinstance(stage, nn.Module):
            raise UsageError(
                f"the stage {shown(stage)} is not a module (expected nn.Modules, or None for other ranks')"
            )
    wanted = ranks * per_rank if per_rank else None
    if not stages or len(stages) % ranks or (wanted is not None and len(stages) != wanted):
        expected = f"{wanted}" if wanted else f"a multiple of {ranks}"
        raise UsageError(f"{len(stages)} stages do not fit {ranks} ranks (expected {expected})")
    return stages


def _refuse_shared(stages: Sequence[nn.Module | None], ranks: int) -> None:
    """Refuses a parameter of two ranks: each would have a part of its gradient only."""
    first: dict[int, tuple[int, str]] = {}
    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters() if stage is not None else ():
            other, other_name = first.setdefault(id(parameter), (index, name))
            if other % ranks != index % ranks:
                raise UsageError(
                    f"stage {other} and stage {index} share a parameter ({other_name} and {name}), and are on "
                    "different ranks (expected stages with parameters of their own)"
                )
