"""The slates of a job on other hosts, by way of its directory, which wants to see the token first."""

from __future__ import annotations

import itertools
import threading
import time
import zlib

from ..config import Options
from ..deadline import Deadline
from ..rendezvous.control_link import ControlLink
from ..rendezvous.join import dial
from ..slate import layout
from ..transports.reactor import Reactor
from ..transports.tcp import check_tls
from ..types import Address
from ..wire import control as say
from ..wire.handshake import Hello, Role
from .reading import RankSlate

__all__ = ["RemoteSlates"]

PATIENCE = 1.0
"""Seconds that one look waits for all ranks."""
FORGET = 30.0
"""Seconds after which the estimate of a clock is made anew: clocks drift."""


class RemoteSlates:
    """Reads the slates of a job through its directory. A `SlateSource`.

    The clock of another host is read by asking: the answer was given between the question and its arrival here. The
    middle of that span is the estimate, and half of it the most by which it is wrong. The shortest span of the last
    time counts.

    Args:
        address: The directory's.
        token: The job's; None for a job without.

    Raises:
        RendezvousError: The directory cannot be reached, or refuses.
    """

    def __init__(self, address: Address, token: bytes | None, options: Options, timeout: float = 5.0) -> None:
        check_tls(options.tls)
        hello = Hello(Role.WATCHER, 0, 0)
        stream = dial([address], hello, token, options, Deadline(timeout), who="the directory")
        self._condition = threading.Condition()
        self._numbers = itertools.count(1)
        self._asked: dict[int, int] = {}
        """When each question was asked, in ns."""
        self._expected: set[int] = set()
        self._latest = 0
        self._found: dict[int, bytes] = {}
        self._known: dict[int, bytes] = {}
        """The last answer of each rank."""
        self._clocks: dict[int, tuple[int, int, float]] = {}
        """For each rank the offset of its clock in ns, how wrong that may be, and when it was found."""
        self.ended = ""
        """Why the connection has ended; empty while it has not."""
        self._reactor = Reactor("phalanx-look")
        self._link = ControlLink(self._reactor, stream, self._heard, self._end)
        self._reactor.call_soon(self._link.start)
        self._reactor.start()

    def __call__(self) -> dict[int, RankSlate]:
        """The slates of the ranks that answer within a second; the last one known of those that do not."""
        number = next(self._numbers)
        deadline = Deadline(PATIENCE)
        with self._condition:
            if self.ended:
                return {}
            self._latest, self._expected, self._found = number, set(), {}
            self._asked = {number: time.monotonic_ns()}
        self._reactor.call_soon(lambda: self._link.send(say.SlateQuery(number)))
        with self._condition:
            while not self.ended and not (self._expected and self._expected <= set(self._found)):
                if not self._condition.wait(deadline.remaining()):
                    break
            self._known = {rank: data for rank, data in self._known.items() if rank in self._expected}
            self._known.update(self._found)
            found = dict(self._known)
            clocks = dict(self._clocks)
        return {
            rank: RankSlate(data, offset_ns=clocks[rank][0], error_ns=clocks[rank][1])
            for rank, data in found.items()
            if rank in clocks
        }

    def close(self) -> None:
        """Stops looking."""
        self._reactor.call_soon(self._link.close)
        self._reactor.stop()

    # -- in the reactor's thread -------------------------------------------------------------------------------------

    def _heard(self, message: say.Message) -> None:
        with self._condition:
            if isinstance(message, say.SlateRanks) and message.query == self._latest:
                self._expected = set(message.ranks)
            elif isinstance(message, say.SlateReply) and message.query == self._latest:
                if message.data:
                    self._keep(message)
                else:
                    self._set_clock(message)
            self._condition.notify_all()

    def _keep(self, message: say.SlateReply) -> None:
        unpacker = zlib.decompressobj()
        try:
            data = unpacker.decompress(message.data, layout.SIZE + 1)
        except zlib.error:
            return
        if layout.is_whole(data) and RankSlate(data).rank == message.rank:
            self._found[message.rank] = data

    def _set_clock(self, message: say.SlateReply) -> None:
        now, asked = time.monotonic_ns(), self._asked[message.query]
        error = (now - asked) // 2
        known = self._clocks.get(message.rank)
        if known is None or error <= known[1] or time.monotonic() - known[2] > FORGET:
            self._clocks[message.rank] = ((asked + now) // 2 - message.clock_ns, error, time.monotonic())

    def _end(self, reason: str) -> None:
        with self._condition:
            self.ended = reason or "the directory went away"
            self._condition.notify_all()
