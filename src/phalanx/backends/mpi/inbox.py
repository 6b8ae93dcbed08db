"""The state of one lane on MPI: what has come for it, and what it is sending."""

from __future__ import annotations

from collections import defaultdict, deque

from ...errors import PhalanxError
from ...transports.mailbox import Mailbox, PendingTransfer
from ...transports.stream import Buffer
from ..lane import Unposted

__all__ = ["Inbox", "Sending"]


class Inbox:
    """The messages that came for one lane, and the ranks that have closed it. It may be older than the lane itself."""

    def __init__(self) -> None:
        self.mailbox = Mailbox()
        self.gone: dict[int, PhalanxError] = {}
        """World ranks to which nothing can be sent any more."""
        self.talked: set[int] = set()
        """World ranks that must hear when this rank closes the lane."""
        self.under_way: defaultdict[int, int] = defaultdict(int)
        """Messages of each world rank whose payload is on its way."""
        self.sending: set[Sending] = set()
        self.ended: BaseException | None = None
        """Why this rank's lane has ended."""
        self.ended_at = 0.0
        self.prepared: deque[Unposted] = deque()
        """Messages that only the fast path knows, in the order of the calls. No receive is posted before them."""
        self.posting = False
        """True while a thread goes on with them."""


class Sending(PendingTransfer):
    """A message that this rank sends."""

    __slots__ = ("dst", "inbox", "lane", "number", "parts", "started")

    def __init__(self, lane: bytes, inbox: Inbox, dst: int, parts: list[Buffer]) -> None:
        super().__init__()
        self.lane = lane
        self.inbox = inbox
        self.dst = dst
        """A world rank."""
        self.parts = parts
        self.number = 0
        self.started = False
        """True once MPI has its memory."""
