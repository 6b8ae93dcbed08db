"""Finds out, in a group's first collective on arrays of a GPU, how its ranks lie: all of them take part."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from ....backends.base import GpuChoice
from ....config import nccl_shares_gpus
from ....cuda.driver import driver
from ....cuda.nccl import nccl
from ....errors import BackendUnavailable, UsageError
from ...running_collective import RunningCollective
from ..base import Engine
from ..segment import SegmentEngine
from .routing import Gpus, Placement

__all__ = ["gpus_of", "meet", "nccl_version"]

_GPU = struct.Struct("<16s8s")
"""Which GPU a rank uses, and which ways its backend allows."""
_NCCL = struct.Struct("<I?")
"""A rank's version of NCCL, and whether that was told to take several ranks on one GPU."""


def meet(running: RunningCollective, host: Engine, device: int, choice: GpuChoice) -> Placement:
    """How the ranks of a group lie, as each of them says.

    NCCL is looked for only where it could be used: to load it takes a while, and much memory.

    Raises:
        UsageError: They allow different ways. All ranks find it.
        DeadlinePassed, FingerprintMismatch, PhalanxError: As every engine.
    """
    told = _tell_all(running, host, _GPU.pack(driver().device_uuid(device), choice.encode()))
    uuids, choices = zip(*map(_GPU.unpack, told), strict=True)
    if len(set(choices)) > 1:
        names = ", ".join(f"{name.rstrip(bytes(1)).decode()} on rank {rank}" for rank, name in enumerate(choices))
        raise UsageError(f"the ranks of this group have different backends for arrays on a GPU: {names}")
    gpus, version, shares = gpus_of(uuids), 0, False
    if gpus is Gpus.OWN or choice in ("nccl", "hybrid"):
        told = _tell_all(running, host, _NCCL.pack(nccl_version(), nccl_shares_gpus()))
        versions, sharing = zip(*map(_NCCL.unpack, told), strict=True)
        version, shares = versions[0] if len(set(versions)) == 1 else 0, all(sharing)
    return Placement(host.size, isinstance(host, SegmentEngine), gpus, nccl=version, nccl_shares=shares)


def gpus_of(uuids: Sequence[bytes]) -> Gpus:
    """How ranks with these GPUs have them."""
    different = len(set(uuids))
    if different == len(uuids) > 1:
        return Gpus.OWN
    return Gpus.ONE if different == 1 else Gpus.MIXED


def nccl_version() -> int:
    """The version of NCCL here, as 23003; 0 without it."""
    try:
        return nccl().version
    except BackendUnavailable:
        return 0


def _tell_all(running: RunningCollective, host: Engine, word: bytes) -> list[bytes]:
    words = np.zeros(host.size * len(word), np.uint8)
    host.all_gather(running, np.frombuffer(word, np.uint8), words, [len(word)] * host.size)
    return [words[at : at + len(word)].tobytes() for at in range(0, words.size, len(word))]
