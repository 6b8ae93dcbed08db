"""The collectives on lists of tensors, which torch.distributed has beside those on one tensor."""

from __future__ import annotations

from dataclasses import replace

from phalanx.cli.bench.operations import OPERATIONS, add_operations

__all__ = ["LISTS"]

_CUT = ("all_gather", "reduce_scatter", "all_to_all")

LISTS = {f"{name}_list": replace(OPERATIONS[name], name=f"{name}_list") for name in _CUT}
"""The same operations on a list of one tensor per rank."""
add_operations(LISTS.values())
