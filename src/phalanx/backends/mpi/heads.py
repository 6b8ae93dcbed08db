"""Receiving heads from MPI, in the order in which each rank sent them."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

from .library import Mpi
from .protocol import INLINE, Head, Word

__all__ = ["MessageHeadReader"]

BATCH = 64
"""Heads that are taken at once, before anything else is looked at."""
LOOKS_BEHIND_OFFERS = 3
"""Looks that find nothing before an offer is believed: what was sent behind it may take it back, and a probe may find
nothing and yet bring in what the next one finds."""


class MessageHeadReader:
    """Takes the heads of one world from its communicator.

    Args:
        comm: The communicator of heads. Heads of an earlier world may still come on it.
        world: Tells this world's heads from those of earlier ones.
    """

    def __init__(self, mpi: Mpi, comm: Any, world: bytes) -> None:
        self._mpi = mpi
        self._world = world
        self._byte = mpi.module.BYTE
        self._status = mpi.module.Status()
        self._probe = comm.Improbe
        self._anyone = (mpi.module.ANY_SOURCE, mpi.module.ANY_TAG)
        self.behind: defaultdict[int, deque[tuple[Any, bytearray]]] = defaultdict(deque)
        """Heads of each rank that are still on their way; what it sent later comes after them."""
        self.unread: deque[Head] = deque()
        """Heads that have come, in order. The caller of `read` takes them. The fast path holds this object, too."""

    def give_back(self, src: int, data: bytes) -> None:
        """Puts a head in line that the fast path has taken and cannot use."""
        head = Head.parse(src, bytearray(data))
        if head.world == self._world:
            self.unread.append(head)

    def read(self) -> bool:
        """Adds the heads that have come to `unread`; False if none came."""
        status = self._status
        found: list[tuple[int, bytearray]] = []
        looks = LOOKS_BEHIND_OFFERS if self.unread else 0
        for _ in range(BATCH):
            with self._mpi.lock:
                message = self._probe(*self._anyone, status)
                if message is None:
                    if looks == 0:
                        break
                    looks -= 1
                    continue
                src: int = status.Get_source()
                size: int = status.Get_count(self._byte)
                data = bytearray(size)
                if size <= 2 * INLINE and not self.behind.get(src):
                    message.Recv([data, self._byte])
                    found.append((src, data))
                    if data[0] == Word.OFFER:
                        looks = LOOKS_BEHIND_OFFERS
                else:
                    self.behind[src].append((message.Irecv([data, self._byte]), data))
        for src, waiting in list(self.behind.items()) if self.behind else ():
            while waiting:
                with self._mpi.lock:
                    if not waiting[0][0].Test():
                        break
                found.append((src, waiting.popleft()[1]))
            if not waiting:
                del self.behind[src]
        if not found:
            return False
        heads = [Head.parse(src, data) for src, data in found]
        heads = [head for head in heads if head.world == self._world]
        # A rank that made an offer and took it back before this rank looked has sent nothing.
        cut = {(head.src, head.number) for head in heads if head.word == Word.CUT}
        if cut:  # an offer that the fast path has given back waits here already
            heads = [*self.unread, *heads]
            self.unread.clear()
        self.unread.extend(head for head in heads if head.word != Word.OFFER or (head.src, head.number) not in cut)
        return True
