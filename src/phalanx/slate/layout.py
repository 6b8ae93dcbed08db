"""The layout of a slate. `cpp/phalanx/slate.hpp` is the same table for the core.

```
header | records | call sites | groups | peers | remote calls | members | text
```

Everything is little-endian and at a fixed place. One process writes, any may read, and no one waits for another. A
record holds its own number while it is whole. A text in the header is whole if its count is even and did not change
meanwhile.
"""

from __future__ import annotations

import zlib
from typing import Final

import numpy as np

__all__ = [
    "CALL",
    "CALLS",
    "CALLS_AT",
    "CLOSED",
    "COUNT_AT",
    "FAILED",
    "GROUP",
    "GROUPS",
    "GROUPS_AT",
    "HEADER",
    "MAGIC",
    "MEMBERS_AT",
    "MEMBERS_BYTES",
    "PEER",
    "PEERS",
    "PEERS_AT",
    "RECORD",
    "RECORDS",
    "RECORDS_AT",
    "RUNNING",
    "SITE",
    "SITES",
    "SITES_AT",
    "SIZE",
    "TEXT_AT",
    "TEXT_BYTES",
    "VERSION",
    "identity_of",
    "is_whole",
]

MAGIC: Final = b"PHXSLATE"
VERSION: Final = 2
RUNNING, CLOSED, FAILED = 0, 1, 2
"""The states of a rank: its world is open, it has closed it on purpose, or its world has failed."""

COUNT_AT: Final = 128
HEADER: Final = np.dtype(
    {
        "names": [
            "magic", "version", "size", "pid", "rank", "world_size", "state", "job", "began_ns", "began_wall_ns",
            "beat_ns", "memory", "identity", "count", "sites", "text", "place_count", "place", "host", "host_id",
            "directory", "process_started", "program", "process_namespace", "failure",
        ],
        "formats": [
            "S8", "<u4", "<u4", "<i4", "<i4", "<i4", "<u4", "S32", "<i8", "<i8",
            "<i8", "<u8", "<u4", "<u8", "<u4", "<u4", "<u8", "S512", "S128", "S128", "S128",
            "S64", "S512", "S64", "S512",
        ],
        "offsets": [
            0, 8, 12, 16, 20, 24, 28, 32, 64, 72,
            80, 88, 96, COUNT_AT, COUNT_AT + 8, COUNT_AT + 12, 192, 256, 768, 896, 1024,
            1152, 1280, 1792, 1856,
        ],
        "itemsize": 4096,
    }
)  # fmt: skip
"""`identity`: see `identity_of`. `failure`: why the job has failed, as its launcher says it; empty if not."""
RECORD: Final = np.dtype(
    [
        ("began_ns", "<i8"),
        ("ended_ns", "<i8"),
        ("sequence", "<u8"),
        ("bytes", "<u8"),
        ("group", "<u4"),
        ("site", "<u4"),
        ("peer", "<i4"),
        ("starved_us", "<u4"),
        ("fingerprint", "<u8"),
        ("number", "<u8"),
    ]
)
"""`ended_ns`: 0 while it runs; the negative of the time if it failed, or was interrupted.
`starved_us`: of the time since the operation before, that in which the rank was ready to run and had no processor; 0
where that is not known."""
SITE: Final = np.dtype(
    [
        ("text", "<u4"),
        ("length", "<u4"),
        ("count", "<u8"),
        ("bytes", "<u8"),
        ("total_ns", "<i8"),
        ("longest_ns", "<i8"),
        ("unused", "<u8", 3),
    ]
)
GROUP: Final = np.dtype(
    [
        ("id", "<u8"),
        ("sequence", "<u8"),
        ("fingerprint", "<u8"),
        ("rank", "<u4"),
        ("size", "<u4"),
        ("text", "<u4"),
        ("length", "<u4"),
        ("since", "<u8"),
        ("unused", "<u8", 2),
    ]
)
"""`since`: the records up to this number are not of this group, but of one that had its place before."""
PEER: Final = np.dtype(
    [
        ("rank", "<i4"),
        ("sockets", "<u4"),
        ("sent", "<u8"),
        ("received", "<u8"),
        ("busy_us", "<u8"),
        ("held_us", "<u8"),
        ("round_trip_us", "<u4"),
        ("lost", "<u4"),
        ("segments", "<u8"),
        ("longest_segment", "<u8"),
    ]
)
"""`busy_us`: time with data on its way to that rank; `held_us`: the part of it in which that rank did not read.
`segments`: packets with data that were sent there, each of `longest_segment` bytes at most."""
CALL: Final = np.dtype(
    [
        ("name", "S56"),
        ("peer", "<i4"),
        ("unused", "<u4"),
        ("count", "<u8"),
        ("failed", "<u8"),
        ("total_ns", "<u8"),
        ("queue_ns", "<u8"),
        ("handler_ns", "<u8"),
        ("more", "<u8", 3),
    ]
)
"""Calls of one function: made to a rank (`total_ns`), or served for all (`peer` -1; queue and handler)."""

RECORDS: Final = 2048
SITES: Final = 256
GROUPS: Final = 64
PEERS: Final = 64
CALLS: Final = 64
MEMBERS_BYTES: Final = 16 << 10
TEXT_BYTES: Final = 64 << 10

RECORDS_AT: Final = HEADER.itemsize
SITES_AT: Final = RECORDS_AT + RECORDS * RECORD.itemsize
GROUPS_AT: Final = SITES_AT + SITES * SITE.itemsize
PEERS_AT: Final = GROUPS_AT + GROUPS * GROUP.itemsize
CALLS_AT: Final = PEERS_AT + PEERS * PEER.itemsize
MEMBERS_AT: Final = CALLS_AT + CALLS * CALL.itemsize
TEXT_AT: Final = MEMBERS_AT + MEMBERS_BYTES
SIZE: Final = TEXT_AT + TEXT_BYTES


def identity_of(data: bytes) -> int:
    """A sum over whose slate this is: version, size, process, rank, world size and job. It shows damage to them."""
    return zlib.crc32(data[8:28] + data[32:64])


def is_whole(data: bytes) -> bool:
    """True for a slate of this version, if it still says whose it is."""
    return (
        len(data) == SIZE
        and data[:8] == MAGIC
        and data[8:12] == VERSION.to_bytes(4, "little")
        and data[96:100] == identity_of(data).to_bytes(4, "little")
    )
