"""Connects to a directory or a peer and proves the token, again and again until the deadline."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..background_thread import BackgroundThread
from ..config.options import Options
from ..deadline import Deadline
from ..errors import AuthenticationFailed, NoConnection, ProtocolError, RendezvousError, Timeout, WorldNotFormed
from ..transports.reactor import Reactor
from ..transports.stream import ConnectionRefused, Stream, StreamEnded, read_exactly, write_all
from ..transports.tcp import check_tls, connect
from ..types import Address
from ..wire import control as say
from ..wire.handshake import ClientHandshake, HandshakeStatus, Hello, Rejected, Role
from .control_link import ControlLink
from .error_codec import EndCause, keep_end

__all__ = ["DirectoryWatch", "dial", "shake_hands", "watch_directory"]

FIRST_PAUSE = 0.02
LONGEST_PAUSE = 0.5
TAKEN_GRACE = 2.0
"""Seconds a rank insists although its place is taken.

The old connection of a rank that was restarted may not have ended yet.
"""


def shake_hands(
    stream: Stream, hello: Hello, token: bytes | None, deadline: Deadline, check: Callable[[], None]
) -> None:
    """The client's side of the handshake on a new connection. `check` may raise to end the wait.

    Raises:
        Rejected, AuthenticationFailed, ProtocolError, StreamEnded, Timeout: As the other side answers.
    """
    machine = ClientHandshake(hello, token, stream.binding)
    write_all(stream, machine.start(), deadline, "handshake", check)
    while not machine.done:
        answer = machine.feed(read_exactly(stream, machine.wants, deadline, "handshake", check))
        if answer:
            write_all(stream, answer, deadline, "handshake", check)


def dial(
    addresses: Sequence[Address],
    hello: Hello,
    token: bytes | None,
    options: Options,
    deadline: Deadline,
    *,
    who: str,
    missing: Sequence[int] = (),
    check: Callable[[], None] = lambda: None,
    rest: Callable[[float], object] = time.sleep,
    gone_after: float = float("inf"),
) -> Stream:
    """Connects to the first address whose server proves that it knows the token. Tries again until the deadline.

    Args:
        who: Whom this is about, for messages: "the directory" or "rank 3".
        missing: The ranks that are missing if there is never an answer.
        check: Called between tries and while waiting; it may raise to end them.
        rest: Waits so many seconds between two tries, or less if there is news that `check` knows.
        gone_after: Seconds without a listener after which a server that did listen there is taken for gone.

    Raises:
        ConnectionRefused: No process listens there any more.
        AuthenticationFailed: The tokens, versions or modes differ.
        Rejected: The other side refused for good.
        WorldNotFormed: There was no answer before the deadline.
    """
    started = time.monotonic()
    pause = FIRST_PAUSE
    reason = ""
    while True:
        for address in addresses:
            try:
                return _try_once(address, hello, token, options, deadline, check)
            except Rejected as error:
                if not _may_change(error.status, hello, len(addresses), time.monotonic() - started):
                    raise _refused(error, address, hello, who) from None
                reason = error.message
            except AuthenticationFailed as error:
                # With several candidates, another job may sit at one of them.
                if len(addresses) == 1:
                    raise AuthenticationFailed(f"{who} at {address}: {error}", rank=hello.number) from None
                reason = f"{address}: {error}"
            except (StreamEnded, Timeout, ProtocolError, NoConnection) as error:
                if not (reason and isinstance(error, Timeout) and deadline.expired):  # earlier tries know more
                    reason = str(error)
                if isinstance(error, ConnectionRefused) and time.monotonic() - started >= gone_after:
                    raise
            check()
        if deadline.remaining() <= pause:
            break
        left = started + gone_after - time.monotonic()
        rest(min(pause, left) if left > 0 else pause)  # the try that decides comes in time
        pause = min(pause * 1.5, LONGEST_PAUSE)
    reason = reason or "nobody listens there"
    where = ", ".join(str(address) for address in addresses[:4])
    hint = "does it run, on the host and port that MASTER_ADDR and MASTER_PORT name here?"
    if hello.number is None:
        hint = "does a job run there that others can join? `phalanx run --elastic` prints the address for them;"
    me = f"{hello.who} could not"
    if hello.role is Role.WATCHER:
        me = "could not"
        hint = "does the job run? its directory is at the port above the master's, or where --directory-port puts it;"
    raise WorldNotFormed(
        f"{me} reach {who} at {where} within {deadline.seconds:g} s: {reason} ({hint} "
        "`phalanx doctor` looks at the way there)",
        missing=missing,
        seconds=deadline.seconds,
        rank=hello.number,
        operation="rendezvous",
    )


def _may_change(status: HandshakeStatus, hello: Hello, addresses: int, waited: float) -> bool:
    """True if it makes sense to try again after this refusal."""
    if status is HandshakeStatus.TARGET:
        return addresses > 1  # somebody passed us on to where we did not want to go: look at the other candidates
    if status is HandshakeStatus.CLOSED:
        return hello.role is Role.RANK  # the job's last world is ending; the next one will begin
    return status is HandshakeStatus.TAKEN and waited <= TAKEN_GRACE


def _try_once(
    address: Address,
    hello: Hello,
    token: bytes | None,
    options: Options,
    deadline: Deadline,
    check: Callable[[], None],
) -> Stream:
    attempt = deadline.sooner(options.handshake_timeout)
    stream = connect(address, attempt, options.tls, check)
    try:
        shake_hands(stream, replace(hello, port=address.port), token, attempt, check)
    except StreamEnded as error:
        stream.close()
        raise StreamEnded(f"{error.reason} during the handshake (is TLS set on one side only?)") from None
    except BaseException:
        stream.close()
        raise
    return stream


def _refused(error: Rejected, address: Address, hello: Hello, who: str) -> RendezvousError:
    detail = {
        HandshakeStatus.TAKEN: f"rank {hello.rank} is already taken by another process",
        HandshakeStatus.WORLD_SIZE: (
            f"it does not have a world of {hello.world_size} ranks (WORLD_SIZE must be the same on all)"
        ),
        HandshakeStatus.RANK: f"{hello.who} is not in its world",
        HandshakeStatus.CLOSED: "its world has already ended",
    }.get(error.status, error.message)
    text = f"{who} at {address} refused {'us' if hello.role is Role.WATCHER else hello.who}: {detail}"
    # The caller of init() gets an error that it can import; between ranks the status still counts.
    return RendezvousError(text, rank=hello.number) if hello.role is Role.RANK else Rejected(error.status, text)


class DirectoryWatch:
    """The directory as the launcher of another node sees it: tells when the world ends.

    Args:
        on_end: Called once, from a thread of its own, with the cause; with the reason alone if the directory itself
            went away.
    """

    def __init__(self, stream: Stream, options: Options, on_end: Callable[[EndCause | str], None]) -> None:
        self._on_end: Callable[[EndCause | str], None] | None = on_end
        stream.watch_host(options.heartbeat_timeout)
        self._options = options
        self._reactor = Reactor("phalanx-watch")
        self._link = ControlLink(self._reactor, stream, self._heard, self._end)
        self._reactor.call_soon(self._link.start)
        self._reactor.call_soon(self._beat)
        self._reactor.start()

    def abort(self, rank: int, reason: str, traceback: str = "") -> None:
        """Ends the world on behalf of a rank of this node that failed without a word."""
        self._reactor.call_soon(lambda: self._link.send(say.Abort(rank, keep_end(reason), keep_end(traceback))))

    def rank_exited(self, rank: int, how: str) -> None:
        """Says that the process of a rank of this node has ended, without a failure."""
        self._reactor.call_soon(lambda: self._link.send(say.Ended(rank, how)))

    def close(self) -> None:
        """Stops watching. May be called twice."""
        self._on_end = None
        self._reactor.call_soon(self._link.close)
        self._reactor.stop()

    def _heard(self, message: say.Message) -> None:
        if isinstance(message, say.Abort):
            self._end(EndCause(message.rank, message.reason, message.traceback, aborted=True))
        elif isinstance(message, say.Lost):
            self._end(EndCause(message.rank, message.reason))
        elif isinstance(message, say.Shutdown):
            self._link.close()

    def _end(self, cause: EndCause | str) -> None:
        callback, self._on_end = self._on_end, None
        if callback is not None:
            BackgroundThread(functools.partial(callback, cause), "phalanx-watch-end").start()

    def _beat(self) -> None:
        with contextlib.suppress(StreamEnded):
            self._link.send(say.Heartbeat())
        self._reactor.call_later(self._options.heartbeat, self._beat)


def watch_directory(
    address: Address,
    *,
    node_rank: int,
    world_size: int,
    token: bytes | None,
    options: Options,
    timeout: float,
    on_end: Callable[[EndCause | str], None],
) -> DirectoryWatch:
    """Connects the launcher of one node to the directory that the first node's launcher hosts.

    Raises:
        AuthenticationFailed: The tokens differ.
        WorldNotFormed: There was no answer.
    """
    check_tls(options.tls)
    hello = Hello(Role.LAUNCHER, node_rank, world_size)
    stream = dial([address], hello, token, options, Deadline(timeout), who="the first node's launcher")
    return DirectoryWatch(stream, options, on_end)
