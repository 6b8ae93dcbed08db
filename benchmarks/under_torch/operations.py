"""What torch.distributed has beside the operations of `phalanx bench`: lists of tensors, and messages in two halves."""

from __future__ import annotations

from dataclasses import replace

from phalanx.cli.bench.operations import OPERATIONS, add_operations

__all__ = ["LISTS", "MESSAGES", "POSTED"]

_CUT = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")

LISTS = {f"{name}_list": replace(OPERATIONS[name], name=f"{name}_list") for name in _CUT}
"""The same operations on a list of one tensor per rank."""
POSTED = "pingpong_async"
"""A ping-pong by `isend` and `irecv`."""
MESSAGES = {"pingpong": OPERATIONS["pingpong"], POSTED: replace(OPERATIONS["pingpong"], name=POSTED)}
"""Messages: by `send` and `recv`, and by their asynchronous halves."""
add_operations([*LISTS.values(), MESSAGES[POSTED]])
