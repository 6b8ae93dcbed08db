"""Whether two backends gave the same."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["differences"]

REFUSED_ON_GLOO = {"data_parallel.zero_redundancy_in_backward", "groups.several_as_one"}
"""What torch does not do on a backend of that name."""
TOLERANCE = 1e-4
"""Of losses after some steps in float32, where the ranks' values are added in another order."""
TOLERANCE_OF_SHORT_FLOATS = 1e-2
SHORT_FLOATS = {"data_parallel.mixed_dtypes"}
"""What adds gradients in bfloat16, which has eight bits."""


def differences(ours: dict[str, list[Any]], theirs: dict[str, list[Any]], *, exact: bool) -> list[str]:
    """What differs, in words.

    Args:
        exact: Whether all bits have to be the same: two ranks have one order only in which to add their values.
    """
    found = [f"{part}: {mine[0]}" for part, mine in ours.items() if isinstance(mine[0], str) and "Error: " in mine[0]]
    for part in {**ours, **theirs}:
        if part in REFUSED_ON_GLOO:
            continue
        tolerance = TOLERANCE_OF_SHORT_FLOATS if part in SHORT_FLOATS else TOLERANCE
        for rank, (mine, other) in enumerate(zip(ours[part], theirs[part], strict=True)):
            if not (mine == other if exact else _close(mine, other, tolerance)):
                found.append(f"{part} on rank {rank}: {mine} instead of {other}")
    return found


def _close(mine: Any, other: Any, tolerance: float) -> bool:
    if isinstance(mine, float) and isinstance(other, float):
        return math.isclose(mine, other, rel_tol=tolerance, abs_tol=tolerance / 10)
    if isinstance(mine, list) and isinstance(other, list):
        return len(mine) == len(other) and all(_close(a, b, tolerance) for a, b in zip(mine, other, strict=True))
    # A hash says of each bit whether it is the same, which it need not be.
    return type(mine) is type(other) and (mine == other or str(mine).startswith("sha256 "))
