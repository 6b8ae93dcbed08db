"""Slates made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.seeing.reading import RankSlate
from phalanx.slate import layout

MS = 1_000_000
START = 1_000 * MS


@dataclass
class Op:
    """One operation on a slate; times in ms after the start. The end of one that failed is negative."""

    sequence: int
    began: float
    ended: float | None
    site: str = "all_reduce\0/home/me/train.py\0main\x0088"
    peer: int = -1
    fingerprint: int = 7
    bytes: int = 8
    starved: float = 0.0


def slate(
    rank: int,
    operations: Sequence[Op],
    *,
    members: Sequence[int] = (0, 1),
    place: str = "",
    state: int = layout.RUNNING,
    beat: float = 0.0,
    alive: bool = True,
    offset_ns: int = 0,
    links: Sequence[tuple[int, int, int, int]] = (),
    since: int = 0,
    known_group: bool = True,
) -> RankSlate:
    """A slate with these operations of one group, which has come to its place after so many records."""
    data = bytearray(layout.SIZE)
    header = np.frombuffer(data, layout.HEADER, 1)[0]
    header["magic"], header["version"] = layout.MAGIC, layout.VERSION
    header["rank"], header["world_size"], header["state"] = rank, len(members), state
    header["began_ns"], header["beat_ns"] = START, START + int(beat * MS)
    header["place"], header["program"], header["job"] = place.encode(), b"train.py", b"job"
    header["count"], header["pid"] = len(operations), 100 + rank
    sites = ["", *dict.fromkeys(op.site for op in operations)]
    table = np.frombuffer(data, layout.SITE, layout.SITES, layout.SITES_AT)
    at = 0
    for number, text in enumerate(sites[1:], 1):
        raw = text.encode()
        data[layout.TEXT_AT + at : layout.TEXT_AT + at + len(raw)] = raw
        mine = [op for op in operations if op.site == text and op.ended is not None]
        table[number]["text"], table[number]["length"], table[number]["count"] = at, len(raw), len(mine)
        table[number]["total_ns"] = sum(int(((op.ended or 0) - op.began) * MS) for op in mine)
        at += len(raw)
    header["sites"], header["text"] = len(sites), at
    group = np.frombuffer(data, layout.GROUP, layout.GROUPS, layout.GROUPS_AT)[1]
    listed = ",".join(map(str, members)).encode()
    data[layout.MEMBERS_AT : layout.MEMBERS_AT + len(listed)] = listed
    group["id"], group["size"], group["length"] = 99 if known_group else 0, len(members), len(listed)
    group["since"] = since
    begun = [op for op in operations if op.sequence]
    group["sequence"] = max((op.sequence for op in begun), default=0)
    group["fingerprint"] = begun[-1].fingerprint if begun else 0
    records = np.frombuffer(data, layout.RECORD, layout.RECORDS, layout.RECORDS_AT)
    for number, op in enumerate(operations, 1):
        record = records[number % layout.RECORDS]
        record["began_ns"] = START + int(op.began * MS)
        end = 0 if op.ended is None else START + int(abs(op.ended) * MS)
        record["ended_ns"] = end if (op.ended or 0) >= 0 else -end
        record["sequence"], record["bytes"], record["peer"] = op.sequence, op.bytes, op.peer
        record["group"], record["site"] = 1, sites.index(op.site)
        record["fingerprint"], record["number"] = op.fingerprint, number
        record["starved_us"] = int(op.starved * 1000)
    peers = np.frombuffer(data, layout.PEER, layout.PEERS, layout.PEERS_AT)
    for row, (peer, sent, busy, held) in zip(peers, links, strict=False):
        row["rank"], row["sockets"], row["sent"], row["busy_us"], row["held_us"] = peer, 1, sent, busy, held
    return RankSlate(bytes(data), alive=alive, offset_ns=offset_ns)
