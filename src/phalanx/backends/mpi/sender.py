"""The sending half of messages through MPI."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
from collections.abc import Sequence

from ...transports.stream import Buffer
from ...wire.frames import FrameKind, pack_header
from .forming import Communicators
from .inbox import Inbox, Sending
from .library import Mpi
from .protocol import INLINE, Word, pack_message, pack_offer, pack_word
from .transfers import Transfers

__all__ = ["PIECE", "MpiSender"]

PIECE = 1 << 30
"""Bytes that are given to MPI as one message."""


class MpiSender:
    """Sends heads and bodies, and keeps the offers that wait for an answer.

    Args:
        world: Tells this world's heads from those of earlier ones.
        transfers: Where everything goes that MPI has not finished at once.
    """

    def __init__(self, mpi: Mpi, comms: Communicators, world: bytes, transfers: Transfers) -> None:
        self._mpi = mpi
        self._heads, self._bodies = comms.heads, comms.bodies
        self._world = world
        self._transfers = transfers
        self._byte = mpi.module.BYTE
        self.highest_tag: int = comms.bodies.Get_attr(mpi.module.TAG_UB) or 32767
        """The tag of a body is the message's number modulo this."""
        # Random, so that the body of a message of an earlier world is not taken for one of this world.
        self.numbers = itertools.count(secrets.randbits(62))
        """Of the messages of this rank whose body follows; the fast path takes from it, too."""
        self._lock = threading.RLock()
        self._offers: dict[int, Sending] = {}

    def send(
        self,
        lane: bytes,
        inbox: Inbox,
        dst: int,
        kind: FrameKind,
        tag: int,
        description: bytes,
        payload: Sequence[Buffer],
    ) -> Sending:
        """Begins to send a message to a world rank. The memory of `payload` must stay until it is done."""
        # In pieces: some transports of MPI cannot move more than 2 GiB at once, and report no error.
        parts: list[Buffer] = [part[at : at + PIECE] for part in payload for at in range(0, len(part), PIECE)]
        size = sum(map(len, parts))
        sending = Sending(lane, inbox, dst, parts)
        header = pack_header(kind, tag, len(description), size)
        inbox.talked.add(dst)
        if size <= INLINE:
            sending.parts, sending.started = [], True
            self._send_head(dst, pack_message(self._world, lane, header, description, parts), sending)
        else:
            sending.number = next(self.numbers)
            self.add_offer(sending)
            self._send_head(dst, pack_offer(self._world, lane, sending.number, header, description, parts))
        return sending

    def add_offer(self, sending: Sending) -> None:
        """Keeps a message that was offered until it is answered."""
        with self._lock:
            self._offers[sending.number] = sending

    def take_offer(self, number: int) -> Sending | None:
        """Removes an offer that has no answer yet, and returns it; None if there is no such one."""
        with self._lock:
            return self._offers.pop(number, None)

    def withdraw_offer(self, sending: Sending) -> bool:
        """Takes back a message whose receiver has not asked for it; False if it has."""
        with self._lock:
            waiting = self._offers.pop(sending.number, None) is not None
            if waiting:
                sending.withdrawn = True
        if waiting:
            self.say(sending.dst, Word.CUT, sending.lane, sending.number)
        return waiting

    def answered(self, number: int, word: Word) -> bool:
        """Sends the body of an offer, or drops it, as the receiver says; False if there is no such offer."""
        sending = self.take_offer(number)
        if sending is None:
            return False
        if word == Word.READY:
            self._send_body(sending)
        else:
            sending.complete()
        return True

    def say(self, dst: int, word: Word, lane: bytes, number: int = 0) -> None:
        """Sends one word."""
        with contextlib.suppress(self._mpi.module.Exception):  # a rank that cannot be told hears of it otherwise
            self._send_head(dst, pack_word(word, self._world, lane, number))

    def _send_body(self, sending: Sending) -> None:
        tag, requests = sending.number % self.highest_tag, []
        for part in sending.parts:
            with self._mpi.lock:
                requests.append(self._bodies.Isend([part, self._byte], sending.dst, tag))
        sending.started = True
        self._transfers.add(requests, sending.parts, sending.complete)

    def _send_head(self, dst: int, head: bytes, sending: Sending | None = None) -> None:
        with self._mpi.lock:
            request = self._heads.Isend([head, self._byte], dst, 0)
            sent = request.Test()
        if not sent:
            done = (lambda: None) if sending is None else sending.complete
            self._transfers.add([request], head, done)
        elif sending is not None:
            sending.complete()
