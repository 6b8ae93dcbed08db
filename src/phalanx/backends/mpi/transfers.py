"""Requests that are under way in MPI."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ...transports.mailbox import PendingTransfer
from .library import Mpi

__all__ = ["Transfer", "Transfers"]


class Transfer:
    """Requests that belong together, the memory that they need, and what to do at their end."""

    __slots__ = ("end", "memory", "on_done", "requests")

    def __init__(self, requests: list[Any], memory: object, on_done: Callable[[], None]) -> None:
        self.requests = requests
        self.memory = memory
        self.on_done = on_done
        self.end: PendingTransfer | None = None
        """Done once it has ended, or was given up, where somebody wants to know."""


class Transfers:
    """All transfers of a world that have not ended."""

    def __init__(self, mpi: Mpi) -> None:
        self._mpi = mpi
        self._open: list[Transfer] = []
        self._lock = threading.RLock()

    def __bool__(self) -> bool:
        return bool(self._open)

    def add(self, requests: list[Any], memory: object, on_done: Callable[[], None]) -> Transfer:
        """Keeps the memory until the requests are done, and then calls `on_done`."""
        transfer = Transfer(requests, memory, on_done)
        with self._lock:
            self._open.append(transfer)
        return transfer

    def test(self) -> bool:
        """Ends the transfers whose requests are done; True if there were any."""
        moved = False
        for transfer in self.unfinished():
            requests = transfer.requests
            with self._mpi.lock:
                while requests and requests[0].Test():
                    requests.pop(0)
            if not requests and self.forget(transfer):
                moved = True
                transfer.on_done()
        return moved

    def forget(self, transfer: Transfer) -> bool:
        """Removes a transfer; False if that was done already."""
        with self._lock:
            if transfer not in self._open:
                return False
            self._open.remove(transfer)
        if transfer.end is not None:
            transfer.end.complete()
        return True

    def end_of(self, transfer: Transfer) -> PendingTransfer | None:
        """An operation that is done once a transfer has ended. None if that was asked before, or if it has."""
        with self._lock:
            if transfer.end is not None or transfer not in self._open:
                return None
            transfer.end = PendingTransfer()
            return transfer.end

    def unfinished(self) -> list[Transfer]:
        """The transfers that have not ended."""
        with self._lock:
            return list(self._open)
