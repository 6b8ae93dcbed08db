"""Starts the directory of a job: in a process of its own or, where there can be none, in a thread of this one."""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Callable
from pathlib import Path

from ...config import Options
from ...errors import InvalidWorldSize
from ...transports.tcp import check_tls, listen
from ...types import Address
from ...wire.control import Note
from ..directory import Directory
from ..error_codec import EndCause
from .process import DirectoryProcess, NotStarted

__all__ = ["HostedDirectory"]

logger = logging.getLogger("phalanx.rendezvous")

START_LIMIT = 20.0
"""Seconds in which the process must say that it serves. A tenth of a second is usual."""


class HostedDirectory:
    """The directory that rank 0 or the launcher hosts. It listens at once; call `ready` before anything is asked of it.

    Args:
        world_size: How many ranks the world has.
        token: What a rank must prove to know; None for a world without authentication.
        bind: Where to listen; port 0 takes any, an empty host all interfaces.
        rank: The rank that hosts it, which ends with its first world; None for a launcher, whose ranks may form the
            next one when all have left.
        job_file: The file by which the ranks find it, to be removed once all have.
        elastic: The most ranks of a world that outlives them; 0 for one that does not.

    Raises:
        ConfigError: The address cannot be listened on, or the TLS files cannot be used.
        InvalidWorldSize: `world_size` is below 1.
    """

    def __init__(
        self,
        world_size: int,
        *,
        token: bytes | None,
        bind: Address,
        options: Options,
        rank: int | None = None,
        job_file: Path | None = None,
        elastic: int = 0,
    ) -> None:
        if world_size < 1:
            raise InvalidWorldSize(world_size)
        check_tls(options.tls)
        listener = listen(bind.host, range(bind.port, bind.port + 1))
        self.address = Address(*listener.getsockname()[:2])
        self._listener: socket.socket | None = listener
        """Kept until the process serves. If it never does, a thread of this process serves; no rank is turned away."""
        self._serving: Directory | DirectoryProcess | None = None
        one_world = rank is not None

        def in_thread(listener: socket.socket) -> Directory:
            return Directory(
                world_size,
                token=token,
                bind=listener,
                options=options,
                one_world=one_world,
                job_file=job_file,
                host=rank,
                elastic=elastic,
            )

        self._in_thread = in_thread
        self._problem = ""
        try:
            self._serving = DirectoryProcess(
                world_size,
                token=token,
                listener=listener,
                options=options,
                one_world=one_world,
                job_file=job_file,
                detached=rank is not None,
                elastic=elastic,
            )
        except NotStarted as error:
            self._problem = str(error)
        except BaseException:
            listener.close()
            raise

    @property
    def pid(self) -> int | None:
        """The process that it runs in, where that is another one."""
        return self._serving.pid if isinstance(self._serving, DirectoryProcess) else None

    def ready(self, timeout: float = math.inf) -> None:
        """Returns once it serves: in a thread, if the process does not in that time. May be called twice."""
        if self._listener is None:
            return
        listener, self._listener = self._listener, None
        if isinstance(self._serving, DirectoryProcess):
            try:
                self._serving.ready(min(START_LIMIT, timeout))
            except NotStarted as error:
                self._serving.close()
                self._serving = None
                self._problem = str(error)
            except BaseException:
                self._serving.close()
                listener.close()
                raise
            else:
                listener.close()
                return
        logger.warning(
            "the directory runs in a thread of this process: while the process is busy or stopped, the other ranks are "
            "not told that one is lost (%s)",
            self._problem,
        )
        try:
            self._serving = self._in_thread(listener)
        except BaseException:
            listener.close()
            raise

    def on_end(self, callback: Callable[[EndCause], None]) -> None:
        """Calls back from a thread, once, when a rank aborted the world or was lost."""
        self._now.on_end(callback)

    def on_change(self, callback: Callable[[Note], None]) -> None:
        """Calls back from a thread for each change of an elastic world."""
        self._now.on_change(callback)

    @property
    def serves(self) -> bool:
        """False once its process has ended."""
        return not isinstance(self._serving, DirectoryProcess) or self._serving.serves

    def abort(self, rank: int, reason: str, traceback: str = "") -> None:
        """Ends the world on behalf of a rank that failed without a word, as its launcher sees it."""
        self._now.abort(rank, reason, traceback)

    def rank_exited(self, rank: int, how: str) -> None:
        """Says that the process of a rank has ended, without a failure."""
        self._now.rank_exited(rank, how)

    def reserve(self, rank: int) -> None:
        """Keeps a number for a rank that the host starts."""
        self._now.reserve(rank)

    @property
    def launchers(self) -> int:
        """The number of launchers of other nodes that watch."""
        return self._now.launchers

    def wait_until_others_left(self, host: int, timeout: float) -> bool:
        """Waits until every rank but `host` has left or is lost; False if the time ran out first."""
        return self._now.wait_until_others_left(host, timeout)

    def close(self) -> None:
        """Ends the directory: it tells the ranks that they are not watched any more. May be called twice."""
        if self._serving is not None:
            self._serving.close()
        self._close_listener()

    def abandon(self) -> None:
        """In a forked child: closes the descriptors only."""
        if self._serving is not None:
            self._serving.abandon()
        self._close_listener()

    def _close_listener(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    @property
    def _now(self) -> Directory | DirectoryProcess:
        assert self._serving is not None, "the directory was asked before it was ready"
        return self._serving
