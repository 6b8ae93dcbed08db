"""The slate of one rank, as its bytes tell it. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..slate import layout

__all__ = ["CallSitePlace", "RankSlate", "SlateGroup"]


@dataclass(frozen=True)
class CallSitePlace:
    """A verb at a line of the program."""

    verb: str
    file: str
    function: str
    line: int

    @property
    def where(self) -> str:
        """The line, as errors show it."""
        return f"{Path(self.file).name}:{self.line} in {self.function}" if self.file else "an unknown place"

    def __str__(self) -> str:
        return f"{self.verb} at {self.where}"


ELSEWHERE = CallSitePlace("an operation", "", "", 0)


@dataclass(frozen=True)
class SlateGroup:
    """A group that the rank is in."""

    number: int
    id: int
    sequence: int
    fingerprint: int
    members: tuple[int, ...]
    since: int = 0
    """Records up to this number are those of a group that had its place before."""


class RankSlate:
    """The slate of a rank at one moment.

    Args:
        data: Its bytes.
        offset_ns: What is to be added to its clock, to have this reader's.
        error_ns: How wrong that may be.
        alive: False if its process has ended.
        stopped: True if its process is stopped.
    """

    def __init__(
        self, data: bytes, *, offset_ns: int = 0, error_ns: int = 0, alive: bool = True, stopped: bool = False
    ) -> None:
        self.data = data
        self.offset_ns = offset_ns
        self.error_ns = error_ns
        self.alive = alive
        self.stopped = stopped
        self.gone = False
        """True if it could not be read any more: what it says is from before."""
        self.header: Any = np.frombuffer(data, layout.HEADER, 1)[0]
        self.rank = int(self.header["rank"])
        self.world_size = int(self.header["world_size"])
        self.pid = int(self.header["pid"])
        self.state = int(self.header["state"])
        self.memory = int(self.header["memory"])
        self.began_ns = int(self.header["began_ns"]) + offset_ns
        self.beat_ns = int(self.header["beat_ns"]) + offset_ns

    def text(self, field: str) -> str:
        """A text of the header."""
        return bytes(self.header[field]).decode(errors="replace")

    @property
    def place(self) -> str:
        """Where the program was last seen."""
        return self.text("place")

    @cached_property
    def records(self) -> npt.NDArray[Any]:
        """The operations that are whole, oldest first, with this reader's times."""
        found = np.frombuffer(self.data, layout.RECORD, layout.RECORDS, layout.RECORDS_AT)
        count = int(self.header["count"])
        # While it was copied, the writer went on: what it may have been writing meanwhile is not looked at.
        numbers = found["number"].astype(np.int64)
        place = np.arange(layout.RECORDS)
        whole = (numbers > max(0, count - layout.RECORDS)) & (numbers % layout.RECORDS == place)
        kept = found[whole]
        kept = kept[np.argsort(kept["number"])]
        kept["began_ns"] += self.offset_ns
        kept["ended_ns"] += np.sign(kept["ended_ns"]) * self.offset_ns
        result: npt.NDArray[Any] = kept
        return result

    @cached_property
    def sites(self) -> list[CallSitePlace]:
        """The call sites, by their numbers in records."""
        table = self.site_table
        text = self.data[layout.TEXT_AT :]
        found = [ELSEWHERE]
        for row in table[1:]:
            parts = text[row["text"] : row["text"] + row["length"]].decode(errors="replace").split("\0")
            whole = len(parts) == 4 and parts[3].isdigit()
            found.append(CallSitePlace(parts[0], parts[1], parts[2], int(parts[3])) if whole else ELSEWHERE)
        return found

    @property
    def site_table(self) -> npt.NDArray[Any]:
        """The counters of each call site."""
        count = min(max(1, int(self.header["sites"])), layout.SITES)
        return np.frombuffer(self.data, layout.SITE, count, layout.SITES_AT)

    def site(self, number: int) -> CallSitePlace:
        """The call site of a record."""
        return self.sites[number] if number < len(self.sites) else ELSEWHERE

    @cached_property
    def groups(self) -> dict[int, SlateGroup]:
        """The groups that the rank is in, by their numbers in records."""
        table = np.frombuffer(self.data, layout.GROUP, layout.GROUPS, layout.GROUPS_AT)
        found = {}
        for number in np.flatnonzero((table["size"] > 0) & (table["id"] > 0)):
            row = table[number]
            start = layout.MEMBERS_AT + int(row["text"])
            listed = self.data[start : start + int(row["length"])].decode(errors="replace").split(",")
            if all(name.isdigit() for name in listed):
                members = tuple(map(int, listed))
                found[int(number)] = SlateGroup(
                    int(number),
                    int(row["id"]),
                    int(row["sequence"]),
                    int(row["fingerprint"]),
                    members,
                    int(row["since"]),
                )
        return found

    @property
    def peers(self) -> npt.NDArray[Any]:
        """The links to other ranks over the network."""
        found = np.frombuffer(self.data, layout.PEER, layout.PEERS, layout.PEERS_AT)
        return found[found["sockets"] > 0]

    @property
    def calls(self) -> npt.NDArray[Any]:
        """The remote calls, made and served."""
        found = np.frombuffer(self.data, layout.CALL, layout.CALLS, layout.CALLS_AT)
        return found[found["count"] > 0]
