"""Which cores the ranks of a host have between them.

A launcher may have bound each rank to cores of its own, as Slurm and mpirun do: a rank that may use one core does not
share it with the others on that account. So ranks tell each other which cores they may use, and count them together.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence

from ..operating_system import core_mask, cores_of_set, within_quota

__all__ = ["cores_between", "own_cores"]

MOST_CORES = 1 << 13
"""As many as Linux can be built for: a longer word of another rank is not believed."""


def own_cores() -> str:
    """The cores that this process may run on, as `Member.cores` has them."""
    mask = core_mask()
    return f"{mask:x}" if mask else ""


def cores_between(ranks: Iterable[str]) -> int:
    """The cores that ranks of this host can use at once; fewer than there are ranks if some have to share one.

    Args:
        ranks: The cores of each, by `own_cores`. A rank that does not know has those of this process.
    """
    return within_quota(_counted(tuple(ranks), own_cores()))


@functools.lru_cache(maxsize=64)
def _counted(ranks: Sequence[str], own: str) -> int:
    unknown = _parsed(own) or (1 << cores_of_set()) - 1
    masks = [_parsed(word) or unknown for word in ranks]
    together = functools.reduce(operator.or_, masks, 0)
    # Where more ranks are kept within a set of cores than it has, so many of them cannot run.
    crowd = max(sum(mask & ~kept == 0 for mask in masks) - kept.bit_count() for kept in {*masks, together})
    return max(1, together.bit_count() if crowd <= 0 else len(masks) - crowd)


def _parsed(word: str) -> int:
    """0 for what is no such word."""
    try:
        mask = int(word, 16)
    except ValueError:
        return 0
    return mask if 0 < mask < 1 << MOST_CORES else 0
