"""Whether all ranks have the same parameters, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..errors import Desync
from ..group import Group
from ..group.data.arrays import adapt_on_host

__all__ = ["check_alike", "fingerprint", "verify"]

SHOWN = 5
"""Names that a message lists."""


def fingerprint(array: Any) -> str:
    """A short hash of an array's dtype, shape and bytes."""
    adapted = adapt_on_host(array, write=False)
    data = np.ascontiguousarray(adapted.array)
    found = hashlib.blake2b(f"{adapted.description}".encode(), digest_size=12)
    found.update(data.reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def verify(named: Mapping[str, Any], group: Group, *, timeout: float | None = None) -> None:
    """Compares arrays on all ranks.

    Raises:
        Desync: They differ; the message names the arrays and the ranks.
    """
    mine = {name: fingerprint(array) for name, array in named.items()}
    check_alike(mine, group, "replicas differ", timeout=timeout)


def check_alike(
    mine: Mapping[str, str], group: Group, what: str, *, shows: bool = False, timeout: float | None = None
) -> None:
    """Compares the ranks' words for each name.

    Args:
        shows: Whether the message has the words, too.

    Raises:
        Desync: They differ; the message names what and where.
    """
    everyone = group.all_gather_object(dict(mine), timeout=timeout)
    lines = []
    for name in dict.fromkeys(name for words in everyone for name in words):
        ranks: dict[str | None, list[int]] = {}
        for rank, words in enumerate(everyone):
            ranks.setdefault(words.get(name), []).append(group.members[rank])
        if len(ranks) > 1:
            sides = " / ".join(
                f"{value or 'missing'} on ranks {_numbers(members)}" if shows else f"ranks {_numbers(members)}"
                for value, members in ranks.items()
            )
            lines.append(f"{name}: {sides}")
    if lines:
        more = f"\n  and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
        raise Desync(f"{what} ({len(lines)} of {len(mine)}):\n  " + "\n  ".join(lines[:SHOWN]) + more)


def _numbers(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
