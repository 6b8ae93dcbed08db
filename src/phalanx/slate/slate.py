"""The slate of this rank, as the rank writes it."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .._native import core
from ..background_thread import BackgroundThread
from ..config import is_watched
from ..errors import ConfigError
from ..operating_system import process_started, resident_memory
from ..transports.stream import LinkState
from . import layout
from .calls import CALLS
from .files import make_file, remove, tidy
from .writing import PythonWriter

if TYPE_CHECKING:
    from .._core import SlateWriter

__all__ = ["Slate", "open_slate"]

logger = logging.getLogger("phalanx.slate")

BEAT = 0.25
"""Seconds between two notes on where the program is."""


class Slate:
    """The slate of a rank in one world. Its operations are noted by `writer`, all else by a thread of its own.

    Args:
        path: The file.
        fd: Its descriptor, which stays the caller's.
        links: Gives the state of the sockets to other ranks.
    """

    def __init__(self, path: Path, fd: int, links: Callable[[], Iterable[tuple[int, LinkState]]]) -> None:
        self._path = path
        self._pid = os.getpid()
        self.writer: SlateWriter | PythonWriter = PythonWriter(fd) if core is None else core.SlateWriter(fd)
        self._memory = self.writer.memory
        self._header: Any = np.frombuffer(self._memory, layout.HEADER, 1)[0]
        self._groups = np.frombuffer(self._memory, layout.GROUP, layout.GROUPS, layout.GROUPS_AT)
        self._peers = np.frombuffer(self._memory, layout.PEER, layout.PEERS, layout.PEERS_AT)
        self._calls = np.frombuffer(self._memory, layout.CALL, layout.CALLS, layout.CALLS_AT)
        self._members = np.frombuffer(self._memory, np.uint8, layout.MEMBERS_BYTES, layout.MEMBERS_AT)
        self._member_texts: dict[bytes, int] = {}
        self._members_used = 0
        self._free = deque(range(1, layout.GROUPS))
        """Places for groups, the one that was free for the longest first."""
        self._links = links
        self._where: Callable[[], str] = lambda: ""
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._failed = False
        self._contents = b""
        """Those of a slate that was closed."""
        self.watched = is_watched()
        """True if a launcher reads it at the end, and removes it."""
        self._header["sites"] = 1  # the first stands for all that there is no room for

    def begin(self, job: str, rank: int, world_size: int, host: str, host_id: str, directory: str) -> None:
        """Says whose slate it is. From then on others can read it."""
        header = self._header
        texts = {
            "job": job,
            "host": host,
            "host_id": host_id,
            "directory": directory,
            "process_started": process_started(self._pid) or "",
            "program": " ".join(sys.argv),
        }
        for field, value in texts.items():
            header[field] = value.encode(errors="replace")[: layout.HEADER[field].itemsize - 1]
        header["size"], header["pid"] = layout.SIZE, self._pid
        header["rank"], header["world_size"] = rank, world_size
        header["began_ns"], header["began_wall_ns"] = time.monotonic_ns(), time.time_ns()
        header["version"] = layout.VERSION
        self._beat()
        header["magic"] = layout.MAGIC
        self._thread = BackgroundThread(self._run, "phalanx-slate", on_error=_note).start()

    # -- groups ------------------------------------------------------------------------------------------------------

    def add_group(self, context: bytes, rank: int, members: Sequence[int]) -> int:
        """Its number on the slate; 0 if there is no room."""
        listed = ",".join(map(str, members)).encode()
        with self._lock:
            if self._contents:
                return 0
            at = self._member_texts.get(listed)
            if at is None:
                at = self._members_used
                if at + len(listed) > layout.MEMBERS_BYTES:
                    return 0
                self._members[at : at + len(listed)] = np.frombuffer(listed, np.uint8)
                self._members_used += len(listed)
                self._member_texts[listed] = at
            if not self._free:
                return 0
            number = self._free.popleft()
            group = self._groups[number]
            group["sequence"], group["fingerprint"] = 0, 0
            group["rank"], group["text"], group["length"] = rank, at, len(listed)
            group["id"] = int.from_bytes(context[:8], "little") or 1
            group["size"] = len(members)
        return number

    def drop_group(self, number: int) -> None:
        """Gives the place of a group back. What is noted there stays until another group needs it."""
        if number and not self._stop.is_set() and os.getpid() == self._pid:
            with self._lock:
                self._free.append(number)

    # -- the thread --------------------------------------------------------------------------------------------------

    def watch_program(self, where: Callable[[], str]) -> None:
        """Notes from now on where the program is, as `where` tells it."""
        self._where = where

    def _run(self) -> None:
        while not self._stop.wait(BEAT):
            self._beat()

    def _beat(self) -> None:
        header = self._header
        where = self._where().encode(errors="replace")[: layout.HEADER["place"].itemsize - 1]
        if where != header["place"]:
            header["place_count"] += 1
            header["place"] = where
            header["place_count"] += 1
        header["memory"] = resident_memory()
        self._note_links()
        self._note_calls()
        header["beat_ns"] = time.monotonic_ns()

    def _note_links(self) -> None:
        peers: dict[int, list[LinkState]] = {}
        for rank, state in self._links():
            peers.setdefault(rank, []).append(state)
        for row, (rank, states) in zip(self._peers, sorted(peers.items()), strict=False):
            row["rank"] = rank
            row["sent"] = max(int(row["sent"]), sum(s.sent for s in states))
            row["received"] = max(int(row["received"]), sum(s.received for s in states))
            row["busy_us"] = max(int(row["busy_us"]), sum(s.busy_us for s in states))
            row["held_us"] = max(int(row["held_us"]), sum(s.held_us for s in states))
            row["round_trip_us"] = min(s.round_trip_us for s in states)
            row["lost"] = sum(s.lost for s in states)
            row["sockets"] = len(states)

    def _note_calls(self) -> None:
        for row, ((name, peer), numbers) in zip(self._calls, list(CALLS.rows.items()), strict=False):
            count, failed, total, queue, handler = numbers
            row["name"], row["peer"] = name.encode(errors="replace")[:55], peer
            row["failed"], row["total_ns"] = int(failed), int(total * 1e9)
            row["queue_ns"], row["handler_ns"] = int(queue * 1e9), int(handler * 1e9)
            row["count"] = int(count)

    def contents(self) -> bytes:
        """The slate now, for a reader on another host."""
        with self._lock:
            return self._contents or bytes(self._memory)

    # -- the end -----------------------------------------------------------------------------------------------------

    def fail(self) -> None:
        """Notes that the world has failed: the slate stays when it is closed, to tell of it."""
        self._failed = True

    def close(self) -> None:
        """The world is closed: removes the file, unless somebody is to read it. May be called twice."""
        if self._stop.is_set() or os.getpid() != self._pid:
            return
        self._stop.set()
        self._thread.join(1.0)
        with contextlib.suppress(Exception):
            self._beat()
        with self._lock:
            self._header["state"] = layout.FAILED if self._failed else layout.CLOSED
            self._contents = bytes(self._memory)
            del self._memory, self._header, self._groups, self._peers, self._calls, self._members
            self.writer.retire()
        if not self.watched and not self._failed:
            remove(self._path)

    def abandon(self) -> None:
        """In a forked child: it is the parent's."""
        self._stop.set()


def open_slate(
    job: str,
    rank: int,
    world_size: int,
    host: str,
    host_id: str,
    directory: str,
    links: Callable[[], Iterable[tuple[int, LinkState]]],
) -> Slate | None:
    """The slate of this rank; None where there is no place for one, which is no reason to fail."""
    try:
        tidy(but=job)
        path, fd = make_file(job, rank)
    except (OSError, ConfigError) as error:
        logger.info("this rank has no slate, so `phalanx top` cannot see it: %s", error)
        return None
    try:
        made = Slate(path, fd, links)
        made.begin(job, rank, world_size, host, host_id, directory)
    except (OSError, RuntimeError) as error:
        logger.info("this rank has no slate, so `phalanx top` cannot see it: %s", error)
        remove(path)
        return None
    finally:
        os.close(fd)
    return made


def _note(error: Exception) -> None:
    logger.info("the slate is not kept up to date any more: %s", error)
