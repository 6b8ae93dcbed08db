"""A job at one moment, as plain data: what all ways of showing it have in common."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = [
    "CallPicture",
    "JobFinding",
    "LinkPicture",
    "Picture",
    "RankPicture",
    "SitePicture",
    "decode_picture",
    "to_plain",
    "words_without_findings",
]

WORTH_A_WORD = 0.5
"""The share of its time that a rank waits, from which not all is well."""


class RankPicture(msgspec.Struct, frozen=True):
    """One rank: its operation, its line, and the ranks that it waits for."""

    rank: int
    pid: int
    host: str
    state: str
    """running, closed, failed, lost (its process is gone), stopped, or silent (its interpreter does not answer)."""
    operation: str
    """The operation that runs, with its number; empty if none does."""
    line: str
    """The line that has called it, or where the program is."""
    seconds: float
    """Since when: the operation, or no operation."""
    waits_for: list[int]
    waiting: float
    """The share of the last seconds spent waiting for other ranks."""
    moving: float
    """The share spent in operations once all had come."""
    bytes_per_second: float
    operations_per_second: float
    memory: int


class SitePicture(msgspec.Struct, frozen=True):
    """A call site, with all ranks added up."""

    verb: str
    where: str
    file: str
    line: int
    count: int
    """Calls of one rank."""
    bytes: int
    seconds: float
    """In all, of one rank on average."""
    waiting: float
    """Of these, waiting for other ranks."""
    last: int
    """The rank that was late for the longest time; -1 if none was."""
    late: float
    """The seconds by which it was."""
    often: float
    """The share of the operations in which it came last."""
    lateness: list[float]
    """The seconds by which each rank was late; empty if that is not known."""


class LinkPicture(msgspec.Struct, frozen=True):
    """The connections from one rank to another over the network."""

    source: int
    target: int
    bytes_per_second: float
    busy: float
    """The share of the time with data on its way."""
    rate: float
    """Bytes per second while there was."""
    round_trip: float
    lost: int
    filled: float = 1.0
    """How full its packets were: little says that messages were short, and waited for each other."""


class CallPicture(msgspec.Struct, frozen=True):
    """Remote calls of one function. Seconds are means."""

    name: str
    caller: int
    server: int
    count: int
    failed: int
    seconds: float
    queue: float
    handler: float
    wire: float


class JobFinding(msgspec.Struct, frozen=True):
    """Something that is wrong."""

    kind: str
    """blocked, straggler, once, link, or mismatch."""
    text: str
    ranks: list[int]
    """The ranks to blame; of a link, its two ends."""
    seconds: float
    where: str = ""


class Picture(msgspec.Struct, frozen=True):
    """A job at one moment."""

    job: str
    program: str
    world_size: int
    elapsed: float
    """Seconds since the job began."""
    observed: float
    """Seconds of it that the sums are about."""
    running: bool
    ranks: list[RankPicture]
    sites: list[SitePicture]
    """All of them, the one that takes the most time first."""
    waits: list[list[float]]
    """Seconds that the rank of the row has waited for the rank of the column."""
    links: list[LinkPicture]
    calls: list[CallPicture]
    findings: list[JobFinding]
    clock_error: float
    """Seconds by which the clocks of other hosts may be off."""


def words_without_findings(picture: Picture) -> tuple[str, bool]:
    """A line on a job of which nothing was found, and whether all is well."""
    if not picture.running:
        return "the job has ended", True
    seen = len(picture.ranks)
    if seen < picture.world_size:
        return f"{seen} of {picture.world_size} ranks can be seen, so nobody knows who waits for the others", False
    most = max(picture.ranks, key=lambda rank: rank.waiting)
    if most.waiting >= WORTH_A_WORD:
        waits = f"rank {most.rank} waits {most.waiting:.0%} of the time"
        return f"no rank is always later than the others, but {waits}", False
    return "nobody waits for long, and no rank is later than the others", True


decode_picture = msgspec.json.Decoder(Picture).decode
"""A picture of the JSON that `msgspec.json.encode` makes of it."""


def to_plain(picture: Picture) -> Any:
    """The picture as dictionaries and lists."""
    return msgspec.to_builtins(picture)
