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
from ..operating_system import memory_namespace, process_started, resident_memory
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


class SlateMemory:
    """The file of a slate, and what of it is taken. It may outlive a world, and serve the next one of this process.

    Args:
        path: The file.
        fd: Its descriptor, which stays the caller's.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.writer: SlateWriter | PythonWriter = PythonWriter(fd) if core is None else core.SlateWriter(fd)
        self.worlds = 0
        """How many worlds have used it."""
        self.member_texts: dict[bytes, int] = {}
        self.members_used = 0
        self.free = deque(range(1, layout.GROUPS))
        """Places for groups, the one that was free for the longest first."""
        self.peer_rows: dict[int, int] = {}
        """The row of each rank among the links."""

    def give_back(self) -> None:
        """Gives its memory back, as far as nobody else does: the core's writer goes with its last group."""
        if isinstance(self.writer, PythonWriter):
            self.writer.retire()


_LEFT: dict[tuple[str, int, int], SlateMemory] = {}
"""Slates that worlds of this process have left for others to read, by job, rank and process."""
MOST_LEFT = 16


class Slate:
    """The slate of a rank in one world. Its operations are noted by `writer`, all else by a thread of its own.

    Args:
        memory: Where it is written.
        links: Gives the state of the sockets to other ranks.
    """

    def __init__(self, memory: SlateMemory, links: Callable[[], Iterable[tuple[int, LinkState]]]) -> None:
        self._kept = memory
        self._pid = os.getpid()
        self.writer = memory.writer
        self._memory = self.writer.memory
        self._header: Any = np.frombuffer(self._memory, layout.HEADER, 1)[0]
        self._groups = np.frombuffer(self._memory, layout.GROUP, layout.GROUPS, layout.GROUPS_AT)
        self._peers = np.frombuffer(self._memory, layout.PEER, layout.PEERS, layout.PEERS_AT)
        self._calls = np.frombuffer(self._memory, layout.CALL, layout.CALLS, layout.CALLS_AT)
        self._members = np.frombuffer(self._memory, np.uint8, layout.MEMBERS_BYTES, layout.MEMBERS_AT)
        self._taken: set[int] = set()
        """The places of this world's groups."""
        self._links = links
        self._links_before = self._peers.copy()
        """The links of former worlds, whose counters go on."""
        self._where: Callable[[], str] = lambda: ""
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._failed = False
        self._contents = b""
        """Those of a slate that was closed."""
        self.watched = is_watched()
        """True if a launcher reads it at the end, and removes it."""
        self._world = memory.worlds
        memory.worlds += 1
        if not self._world:
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
            "process_namespace": str(memory_namespace() or ""),
            "program": " ".join(sys.argv),
        }
        for field, value in texts.items():
            header[field] = value.encode(errors="replace")[: layout.HEADER[field].itemsize - 1]
        self._key = job, rank, self._pid
        header["size"], header["pid"] = layout.SIZE, self._pid
        header["rank"], header["world_size"] = rank, world_size
        if not self._world:
            header["began_ns"], header["began_wall_ns"] = time.monotonic_ns(), time.time_ns()
        header["version"], header["state"] = layout.VERSION, layout.RUNNING
        header["identity"] = layout.identity_of(bytes(self._memory[:64]))
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
            kept = self._kept
            at = kept.member_texts.get(listed)
            if at is None:
                at = kept.members_used
                if at + len(listed) > layout.MEMBERS_BYTES:
                    return 0
                self._members[at : at + len(listed)] = np.frombuffer(listed, np.uint8)
                kept.members_used += len(listed)
                kept.member_texts[listed] = at
            if not kept.free:
                return 0
            number = kept.free.popleft()
            self._taken.add(number)
            group = self._groups[number]
            group["sequence"], group["fingerprint"], group["since"] = 0, 0, self._header["count"]
            group["rank"], group["text"], group["length"] = rank, at, len(listed)
            # The groups of two worlds have the same contexts, and are not the same.
            group["id"] = (int.from_bytes(context[:8], "little") + self._world) % (1 << 64) or 1
            group["size"] = len(members)
        return number

    def drop_group(self, number: int) -> None:
        """Gives the place of a group back. What is noted there stays until another group needs it."""
        if number and not self._stop.is_set() and os.getpid() == self._pid:
            with self._lock:
                if number in self._taken:
                    self._taken.remove(number)
                    self._kept.free.append(number)

    # -- the thread --------------------------------------------------------------------------------------------------

    def watch_program(self, where: Callable[[], str]) -> None:
        """Notes from now on where the program is, as `where` tells it."""
        self._where = where

    def _run(self) -> None:
        while not self._stop.wait(BEAT):
            self._beat()

    def _beat(self) -> None:
        header = self._header
        if not self._failed and not self._stop.is_set():  # what it does afterwards is not what the others waited for
            self._note_place(self._where())
        header["memory"] = resident_memory()
        self._note_links()
        self._note_calls()
        header["beat_ns"] = time.monotonic_ns()

    def _note_place(self, place: str) -> None:
        header = self._header
        where = place.encode(errors="replace")[: layout.HEADER["place"].itemsize - 1]
        if where != header["place"]:
            header["place_count"] += 1
            header["place"] = where
            header["place_count"] += 1

    def _note_links(self) -> None:
        peers: dict[int, list[LinkState]] = {}
        for rank, state in self._links():
            peers.setdefault(rank, []).append(state)
        rows = self._kept.peer_rows
        for rank, states in sorted(peers.items()):
            number = rows.setdefault(rank, len(rows))
            if number >= layout.PEERS:
                continue
            row, before = self._peers[number], self._links_before[number]
            row["rank"] = rank
            for name in ("sent", "received", "busy_us", "held_us", "segments"):
                row[name] = max(int(row[name]), int(before[name]) + sum(getattr(s, name) for s in states))
            row["round_trip_us"] = min(s.round_trip_us for s in states)
            row["lost"] = sum(s.lost for s in states)
            row["longest_segment"] = max(s.longest_segment for s in states)
            row["sockets"] = len(states)

    def _note_calls(self) -> None:
        # Names that differ only behind the place for them are one.
        calls: dict[tuple[bytes, int], list[float]] = {}
        for (name, peer), numbers in list(CALLS.rows.items()):
            key = name.encode(errors="replace")[: layout.CALL["name"].itemsize - 1], peer
            former = calls.get(key)
            calls[key] = numbers if former is None else [a + b for a, b in zip(former, numbers, strict=True)]
        for row, ((short, peer), numbers) in zip(self._calls, calls.items(), strict=False):
            count, failed, total, queue, handler = numbers
            row["name"], row["peer"] = short, peer
            row["failed"], row["total_ns"] = int(failed), int(total * 1e9)
            row["queue_ns"], row["handler_ns"] = int(queue * 1e9), int(handler * 1e9)
            row["count"] = int(count)

    def contents(self) -> bytes:
        """The slate now, for a reader on another host."""
        with self._lock:
            return self._contents or bytes(self._memory)

    # -- the end -----------------------------------------------------------------------------------------------------

    def fail(self, place: str = "") -> None:
        """Notes that the world has failed: the slate stays when it is closed, to tell of it.

        Args:
            place: Where the program was then, if that is known.
        """
        self._failed = True
        if place:
            with self._lock:
                if not self._contents:
                    self._note_place(place)

    def close(self) -> None:
        """The world is closed: removes the file, unless somebody is to read it. May be called twice."""
        if self._stop.is_set() or os.getpid() != self._pid:
            return
        self._stop.set()
        self._thread.join(1.0)
        with contextlib.suppress(Exception):
            self._beat()
        kept = self._kept
        stays = self.watched or self._failed
        with self._lock:
            self._header["state"] = layout.FAILED if self._failed else layout.CLOSED
            self._contents = bytes(self._memory)
            del self._memory, self._header, self._groups, self._peers, self._calls, self._members
            kept.free.extend(sorted(self._taken))
            if not stays:
                kept.give_back()
        if stays:
            while len(_LEFT) >= MOST_LEFT:
                _LEFT.pop(next(iter(_LEFT))).give_back()
            _LEFT[self._key] = kept
        else:
            remove(kept.path)

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
    memory: SlateMemory | None = None
    try:
        tidy(but=job)
        memory = _memory_of(job, rank)
        made = Slate(memory, links)
        made.begin(job, rank, world_size, host, host_id, directory)
    except (OSError, RuntimeError, ConfigError) as error:
        logger.info("this rank has no slate, so `phalanx top` cannot see it: %s", error)
        if memory is not None:
            remove(memory.path)
        return None
    return made


def _memory_of(job: str, rank: int) -> SlateMemory:
    """The slate that an earlier world of this process has left, or a new one.

    Raises:
        OSError, RuntimeError, ConfigError: There is no place for one.
    """
    left = _LEFT.pop((job, rank, os.getpid()), None)
    if left is not None and left.path.exists():
        return left
    path, fd = make_file(job, rank)
    try:
        return SlateMemory(path, fd)
    except BaseException:
        remove(path)
        raise
    finally:
        os.close(fd)


def _note(error: Exception) -> None:
    logger.info("the slate is not kept up to date any more: %s", error)
