"""Memory that all ranks of a group have in common, where they are processes of one host."""

from __future__ import annotations

import logging
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from ...group import Group
from ...transports.shared_memory import NONCE_BYTES, make_memory, map_memory, open_memory

__all__ = ["share_memory"]

logger = logging.getLogger("phalanx.parallel")

_HEAD = 4096
"""Bytes before the memory that is used: those that prove which memory it is, and room to a page."""
assert NONCE_BYTES <= _HEAD


def share_memory(group: Group, size: int, timeout: float | None = None) -> npt.NDArray[np.uint8] | None:
    """New memory, full of zeros, that every rank of the group reads and writes; None if there can be none.

    All ranks call it, and all get it or none. It is given back when nobody holds the array any more.

    Raises:
        As `Group.broadcast_object`.
    """
    if not group._may_share_memory:
        return None
    fd, problem = -1, ""
    offer: Any = None
    try:
        if group.rank == 0:
            try:
                fd, nonce = make_memory("phalanx-parameters", _HEAD + size)
                offer = [os.getpid(), fd, nonce]
            except OSError as error:
                problem = str(error)
        offer = group.broadcast_object(offer, 0, timeout=timeout)
        mapped = None
        if offer is not None:
            try:
                if group.rank:
                    fd = open_memory(offer[0], offer[1], _HEAD + size, offer[2])
                mapped = map_memory(fd, _HEAD + size)
            except (OSError, ValueError) as error:
                problem = str(error)
        problems = group.all_gather_object(problem, timeout=timeout)  # nobody closes it before all have opened it
    finally:
        if fd >= 0:
            os.close(fd)
    for rank, words in enumerate(problems):
        if words:
            logger.warning("rank %d cannot share memory (%s): parameters are gathered", group.members[rank], words)
            return None
    assert mapped is not None
    return np.frombuffer(mapped, np.uint8, offset=_HEAD)
