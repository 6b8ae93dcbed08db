"""NCCL: whether it is there, what it would be used for, and what it would refuse."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.config import nccl_shares_gpus
from phalanx.cuda.driver import driver
from phalanx.cuda.nccl import nccl, version_text
from phalanx.errors import BackendUnavailable, PhalanxError
from phalanx.group.engines.cuda.routing import MULTI_RANK_NCCL

from .findings import Finding, Situation, check, ok, warning

__all__ = ["nccl_library"]


@check("NCCL")
def nccl_library(situation: Situation) -> Iterator[Finding]:
    """NCCL and nccl4py, beside the GPUs and ranks of this host."""
    topic = "NCCL"
    try:
        count = driver().device_count
    except PhalanxError:  # the GPUs' own check says it
        return
    ranks = situation.local_ranks
    try:
        version = nccl().version
    except BackendUnavailable as error:
        if count > 1 or situation.several_hosts:
            yield warning(
                topic,
                str(error),
                "Arrays of ranks with a GPU each go through the memory of the host, which is slower. NCCL moves them "
                "between the GPUs.",
            )
        else:
            yield ok(topic, f"{error}; with one GPU on one host nothing needs it")
        return
    yield ok(topic, f"NCCL {version_text(version)} by nccl4py, for collectives of ranks with a GPU each")
    if ranks <= count:
        return
    told = nccl_shares_gpus(situation.env)
    found = f"{ranks} ranks share {count} GPU{'s' if count > 1 else ''}"
    if told and version >= MULTI_RANK_NCCL:
        yield ok(topic, f"{found}, which NCCL was told to take; only NcclBackend and HybridBackend use it so")
    elif told:
        yield warning(
            topic,
            f"{found}: NCCL_MULTI_RANK_GPU_ENABLE is set, but NCCL {version_text(version)} does not know it",
            f"NCCL {version_text(MULTI_RANK_NCCL)} and later do. phalanx.init() needs none for ranks that share a GPU.",
        )
    else:
        yield ok(topic, f"{found}, which NCCL refuses (duplicate GPU): phalanx.init() does not use it for them")
