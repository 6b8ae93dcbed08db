"""The job's world as its launchers see it. The only module of the launcher that knows the directory.

The first node's launcher hosts the directory, so that no rank is special. The launchers of the other nodes watch it.
Each hears why a world ended, and tells the directory what it sees of the ranks of its own node: one that failed without
a word, and one that is done, which others may be waiting for.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from phalanx.background_thread import BackgroundThread
from phalanx.errors import RendezvousError, WorldNotFormed
from phalanx.exception_text import describe
from phalanx.types import Address

if TYPE_CHECKING:
    from phalanx.config import Options
    from phalanx.rendezvous.error_codec import EndCause
    from phalanx.rendezvous.hosting.start import HostedDirectory
    from phalanx.rendezvous.join import DirectoryWatch
    from phalanx.wire.control import Note

__all__ = ["HostedWorld", "JoinedWorld", "LaunchedWorld", "WatchedWorld", "WorldEnd"]

logger = logging.getLogger("phalanx.run")

TRY = 1.0
"""Seconds of one attempt to reach the first node's launcher; between two, it looks whether the job is over."""
LAST_TRY = 5.0
"""Seconds that a launcher whose rank failed at once waits for the connection over which to say so."""
ARRIVAL = 2 * TRY
"""Seconds in which launchers that waited for the directory are let in, once it serves: one may have to try again."""
WARN_AFTER = 15
"""Attempts after which the launcher says what it is waiting for."""


@dataclass(frozen=True)
class WorldEnd:
    """Why a world ended before its ranks did."""

    rank: int | None
    """The rank that aborted it or was lost; None if it was no rank's doing."""
    reason: str
    traceback: str = ""
    aborted: bool = True
    """True if a rank aborted the world, False if the rank was lost without a word."""


class LaunchedWorld(Protocol):
    """The world as the supervisor sees it."""

    address: Address

    @property
    def pid(self) -> int | None:
        """The directory's process, if it is a child of this one."""

    def abort(self, rank: int, reason: str, traceback: str) -> None:
        """Tells all nodes that a rank of this node failed."""

    def rank_exited(self, rank: int, how: str) -> None:
        """Tells the directory that the process of a rank of this node has ended without a failure."""

    def reserve(self, rank: int) -> None:
        """Keeps a number for a rank that is about to join an elastic world."""

    @property
    def serves(self) -> bool:
        """False once the directory is known to be gone."""

    def others(self) -> int:
        """How many other nodes still need this launcher."""

    def close(self) -> None:
        """Gives everything back. May be called twice."""


class HostedWorld:
    """On the first node: the directory itself.

    Args:
        bind: Where it listens, and where ranks find it; port 0 takes any.
        on_end: Called once, from another thread.
        on_change: Called for each change of an elastic world, from another thread.
        elastic: The most ranks of a world that outlives them; 0 for one that does not.

    Raises:
        ConfigError: The address cannot be listened on.
    """

    def __init__(
        self,
        world_size: int,
        *,
        bind: Address,
        token: bytes,
        options: Options,
        several_nodes: bool,
        on_end: Callable[[WorldEnd], None],
        on_change: Callable[[Note], None] | None = None,
        elastic: int = 0,
    ) -> None:
        from phalanx.rendezvous.addresses import directory_host
        from phalanx.rendezvous.hosting.start import HostedDirectory

        host = directory_host(bind.host, all_local=not several_nodes)
        self._directory: HostedDirectory = HostedDirectory(
            world_size, token=token, bind=Address(host, bind.port), options=options, elastic=elastic
        )
        self._on_change = on_change
        self._on_end = on_end
        self._several_nodes = several_nodes
        self.address = Address(bind.host, self._directory.address.port)
        self._serves_since = 0.0
        self._lock = threading.Lock()
        self._later: list[Callable[[], None]] | None = []
        """Messages to the directory until it serves; None from then on."""
        # In the background: the launcher watches its ranks from the moment when they are started.
        self._starting = BackgroundThread(self._start, "phalanx-start").start()

    @property
    def pid(self) -> int | None:
        """The directory's process."""
        return self._directory.pid

    def _start(self) -> None:
        def ended(cause: EndCause) -> None:
            self._on_end(WorldEnd(*cause))

        self._directory.ready()
        self._serves_since = time.monotonic()
        self._directory.on_end(ended)
        if self._on_change is not None:
            self._directory.on_change(self._on_change)
        with self._lock:
            for call in self._later or ():
                call()
            self._later = None

    def _tell(self, call: Callable[[], None]) -> None:
        with self._lock:
            if self._later is not None:
                self._later.append(call)
                return
        call()

    def rank_exited(self, rank: int, how: str) -> None:
        """Tells the directory that the process of a rank has ended without a failure."""
        self._tell(lambda: self._directory.rank_exited(rank, how))

    def reserve(self, rank: int) -> None:
        """Keeps a number for a rank that is about to join."""
        self._tell(lambda: self._directory.reserve(rank))

    def abort(self, rank: int, reason: str, traceback: str) -> None:
        """Tells all nodes that a rank of this node failed."""
        self._tell(lambda: self._directory.abort(rank, reason, traceback))

    @property
    def serves(self) -> bool:
        """False once the directory's process has ended."""
        return self._directory.serves

    def others(self) -> int:
        """How many launchers of other nodes watch."""
        if not self._several_nodes:
            return 0
        self._starting.join()
        # Those who came before it served are still proving themselves.
        coming = time.monotonic() < self._serves_since + ARRIVAL
        return max(self._directory.launchers, int(coming))

    def close(self) -> None:
        """Closes the directory."""
        self._starting.join()
        self._directory.close()


class WatchedWorld:
    """On the other nodes: a connection to the directory, made in the background: the first node may start later."""

    pid: int | None = None
    serves = True

    def __init__(
        self,
        world_size: int,
        *,
        address: Address,
        node: int,
        token: bytes,
        options: Options,
        on_end: Callable[[WorldEnd], None],
    ) -> None:
        self.address = address
        self._watch: DirectoryWatch | None = None
        self._last_words: tuple[int, str, str] | None = None
        self._exited: list[tuple[int, str]] = []
        """Messages to the directory until it can be reached."""
        self._closed = threading.Event()
        self._settled = threading.Event()
        self._lock = threading.Lock()
        self._on_end = on_end
        connect = functools.partial(self._connect, world_size, node, token, options)
        self._thread = BackgroundThread(connect, "phalanx-join").start()

    def _connect(self, world_size: int, node: int, token: bytes, options: Options) -> None:
        from phalanx.rendezvous.join import watch_directory

        def attempt() -> DirectoryWatch:
            return watch_directory(
                self.address,
                node_rank=node,
                world_size=world_size,
                token=token,
                options=options,
                timeout=TRY,
                on_end=self._ended,
            )

        tries = 0
        while not self._closed.is_set():
            try:
                watch = attempt()
            except WorldNotFormed as error:
                tries += 1
                if tries == WARN_AFTER:
                    logger.warning("still no answer from the first node's launcher: %s", error)
            except RendezvousError as error:
                self._on_end(WorldEnd(None, str(error)))
                break
            except Exception as error:  # no more descriptors or threads: the end of the world would never be heard
                self._on_end(WorldEnd(None, f"the first node's launcher cannot be watched: {describe(error)}"))
                break
            else:
                with self._lock:
                    self._watch = watch
                    for exited in self._exited:
                        watch.rank_exited(*exited)
                    if self._last_words is not None:
                        watch.abort(*self._last_words)
                    if self._closed.is_set():
                        watch.close()
                break
        self._settled.set()

    def _ended(self, cause: EndCause | str) -> None:
        if isinstance(cause, str):
            self._on_end(WorldEnd(None, f"the first node's launcher at {self.address} is gone: {cause}"))
        else:
            self._on_end(WorldEnd(*cause))

    def abort(self, rank: int, reason: str, traceback: str) -> None:
        """Tells all nodes that a rank of this node failed."""
        with self._lock:
            if self._watch is not None:
                self._watch.abort(rank, reason, traceback)
            elif self._last_words is None:
                self._last_words = (rank, reason, traceback)

    def rank_exited(self, rank: int, how: str) -> None:
        """Tells the directory that the process of a rank has ended without a failure."""
        with self._lock:
            if self._watch is not None:
                self._watch.rank_exited(rank, how)
            else:
                self._exited.append((rank, how))

    def reserve(self, rank: int) -> None:
        """Does nothing: only the first node's launcher starts ranks that join."""

    def others(self) -> int:
        """0: other nodes need only the launcher of the first."""
        return 0

    def close(self) -> None:
        """Stops watching, after a short wait for messages that are still to be sent."""
        if self._last_words is not None or self._exited:
            self._settled.wait(LAST_TRY)
        with self._lock:
            self._closed.set()
            if self._watch is not None:
                self._watch.close()


class JoinedWorld:
    """An elastic world that is hosted elsewhere. Its ranks join it by themselves, and each is lost for itself."""

    pid: int | None = None
    serves = True

    def __init__(self, address: Address) -> None:
        self.address = address

    def abort(self, rank: int, reason: str, traceback: str) -> None:
        """Does nothing: the others go on."""

    def rank_exited(self, rank: int, how: str) -> None:
        """Does nothing: the directory sees it."""

    def reserve(self, rank: int) -> None:
        """Does nothing: the directory numbers its ranks."""

    def others(self) -> int:
        """0: nobody needs this launcher."""
        return 0

    def close(self) -> None:
        """Does nothing."""
