"""Forming a classic world: the star and the mesh of the classic wire. No authentication, but bounded in time.

A stray connection is dropped and logged, where ferrotorch would give up; a worker that comes before its master tries
again.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import time
from collections.abc import Iterator

from ..deadline import Deadline
from ..errors import ConfigError, InvalidRank, InvalidWorldSize, MissingVariable, ProtocolError, Timeout, WorldNotFormed
from ..operating_system import hung_up
from ..transports.stream import Stream, StreamEnded, read_exactly, write_all
from ..transports.tcp import connect, listen
from ..types import Address
from ..wire.classic import rendezvous as wire

__all__ = ["form_mesh", "form_star"]

logger = logging.getLogger("phalanx.rendezvous")

RETRY_PAUSE = 0.05
HELLO_TIME = 5.0
"""Seconds a connection has for its few bytes of hello."""
MAX_WAITING = 256
"""Connections that may be saying hello at once; the oldest goes first."""


def _check(rank: int, world_size: int, master: str | Address | None) -> Address:
    if world_size < 2:
        raise InvalidWorldSize(world_size, minimum=2)
    if not 0 <= rank < world_size:
        raise InvalidRank(rank, world_size)
    if master is None:
        raise MissingVariable("MASTER_ADDR", "a classic world needs a master address (host:port)")
    return Address.of(master, what="master")


def form_star(rank: int, world_size: int, master: str | Address | None, deadline: Deadline) -> dict[int, Stream]:
    """The star: rank 0 gets a stream to each other rank, the others one to rank 0.

    Raises:
        InvalidRank, InvalidWorldSize: Before any socket is opened.
        WorldNotFormed: Not all came in time.
    """
    address = _check(rank, world_size, master)
    if rank != 0:
        return {0: _connect(address, deadline, rank, hello=wire.pack_hello(rank))}
    expected = set(range(1, world_size))
    with _listening(address) as listener:
        found = _accept(listener, expected, wire.HELLO_SIZE, deadline, rank)
    return {peer: stream for peer, (stream, _) in found.items()}


def form_mesh(
    rank: int, world_size: int, master: str | Address | None, bind_addr: str | Address, deadline: Deadline
) -> dict[int, Stream]:
    """The mesh: a stream to each other rank.

    Raises:
        InvalidRank, InvalidWorldSize: Before any socket is opened.
        ConfigError: The address to listen on is not IPv4.
        WorldNotFormed: Not all came in time.
    """
    address = _check(rank, world_size, master)
    bind = Address.of(bind_addr, what="bind_addr")
    streams: dict[int, Stream] = {}
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listening(bind))
        mine = Address(*listener.getsockname()[:2])
        if mine.host == "0.0.0.0":
            raise ConfigError("bind_addr 0.0.0.0 cannot be advertised to peers (name the address they should use)")
        advertisement = wire.pack_advertisement(mine)
        table = _exchange_table(rank, world_size, address, advertisement, deadline)
        try:
            higher = set(range(rank + 1, world_size))
            for peer, (stream, _) in _accept(listener, higher, wire.HELLO_SIZE, deadline, rank).items():
                streams[peer] = stream
            for peer in range(rank):
                streams[peer] = _connect(table[peer], deadline, rank, missing=peer, hello=wire.pack_hello(rank))
        except BaseException:
            for stream in streams.values():
                stream.close()
            raise
    return streams


def _exchange_table(
    rank: int, world_size: int, master: Address, advertisement: bytes, deadline: Deadline
) -> list[Address]:
    table_size = world_size * wire.ADVERTISEMENT_SIZE
    if rank != 0:
        stream = _connect(master, deadline, rank, hello=wire.pack_hello(rank) + advertisement)
        try:
            return wire.parse_table(read_exactly(stream, table_size, deadline, "rendezvous"), world_size)
        except Timeout:
            raise _not_formed(rank, deadline, []) from None
        except StreamEnded as error:
            raise WorldNotFormed(f"rank {rank}: the master went away: {error.reason}", missing=[0], rank=rank) from None
        finally:
            stream.close()
    expected = set(range(1, world_size))
    with _listening(master) as listener:
        found = _accept(listener, expected, wire.HELLO_SIZE + wire.ADVERTISEMENT_SIZE, deadline, rank)
    parts = [advertisement] + [found[peer][1] for peer in sorted(found)]
    table = b"".join(parts)
    try:
        for stream, _ in found.values():
            with contextlib.suppress(StreamEnded):  # a rank that died now is missed by its peers
                write_all(stream, table, deadline, "rendezvous")
    finally:
        for stream, _ in found.values():
            stream.close()
    return wire.parse_table(table, world_size)


@contextlib.contextmanager
def _listening(address: Address) -> Iterator[socket.socket]:
    listener = listen(address.host, range(address.port, address.port + 1))
    try:
        yield listener
    finally:
        listener.close()


def _connect(address: Address, deadline: Deadline, rank: int, *, hello: bytes, missing: int = 0) -> Stream:
    """Connects and says hello, again and again until the deadline: the other side may not be there yet."""
    while True:
        try:
            stream = connect(address, deadline, None)
            try:
                write_all(stream, hello, deadline, "hello")
                return stream
            except BaseException:
                stream.close()
                raise
        except StreamEnded as error:
            if deadline.remaining() <= RETRY_PAUSE:
                raise WorldNotFormed(
                    f"rank {rank} could not reach rank {missing} at {address} within {deadline.seconds:g} s: "
                    f"{error.reason}",
                    missing=[missing],
                    seconds=deadline.seconds,
                    rank=rank,
                    operation="rendezvous",
                ) from None
        time.sleep(RETRY_PAUSE)


def _accept(
    listener: socket.socket, expected: set[int], size: int, deadline: Deadline, rank: int
) -> dict[int, tuple[Stream, bytes]]:
    """Waits until each expected rank has connected and said who it is; returns its stream and the rest of its hello."""
    door = _Door(listener, expected, size, rank)
    try:
        while missing := sorted(expected - door.found.keys()):
            door.serve(deadline.sooner(0.5))
            if deadline.expired and expected - door.found.keys():
                raise _not_formed(rank, deadline, missing)
    except BaseException:
        for stream, _ in door.found.values():
            stream.close()
        raise
    finally:
        door.close()
    return door.found


class _Door:
    """Lets in each expected rank once, and turns away who says nothing, or something wrong.

    Args:
        size: Bytes of a hello: the rank, and on the way to the master of a mesh the advertisement.
    """

    def __init__(self, listener: socket.socket, expected: set[int], size: int, rank: int) -> None:
        self.found: dict[int, tuple[Stream, bytes]] = {}
        self._waiting: dict[int, tuple[Stream, bytearray, float]] = {}
        self._listener = listener
        self._world_size = max(expected, default=0) + 1
        self._size = size
        self._rank = rank
        self._poller = select.poll()
        self._poller.register(listener, select.POLLIN)

    def serve(self, deadline: Deadline) -> None:
        """Does what there is to do now, or waits for it."""
        for fd, _ in self._poller.poll(deadline.poll_ms()):
            if fd == self._listener.fileno():
                self._welcome()
            elif fd in self._waiting:
                self._read(fd)
            else:
                self._forget(fd)
        old = time.monotonic() - HELLO_TIME
        for fd in [fd for fd, (_, _, since) in self._waiting.items() if since < old]:
            self._drop(fd, f"no hello within {HELLO_TIME:g} s")

    def close(self) -> None:
        """Drops connections that have not said which rank they are."""
        for stream, _, _ in self._waiting.values():
            stream.close()

    def _welcome(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            stream = Stream(self._listener.accept()[0])
            if len(self._waiting) >= MAX_WAITING:
                self._drop(next(iter(self._waiting)), "too many connections at once; it was the oldest")
            self._waiting[stream.fd] = (stream, bytearray(), time.monotonic())
            self._poller.register(stream.fd, select.POLLIN)

    def _read(self, fd: int) -> None:
        stream, data, _ = self._waiting[fd]
        chunk = bytearray(self._size - len(data))
        try:
            data += chunk[: stream.receive_into(memoryview(chunk))]
            if len(data) < self._size:
                return
            peer = wire.parse_peer_hello(data[: wire.HELLO_SIZE], self._rank, self._world_size)
            rest = bytes(data[wire.HELLO_SIZE :])
            if rest:
                wire.parse_advertisement(rest)  # a wrong one would make the table useless for all
        except (StreamEnded, ProtocolError) as error:
            self._drop(fd, str(error))
            return
        if peer in self.found:
            self._drop(fd, f"rank {peer} is here already")
            return
        del self._waiting[fd]
        self.found[peer] = (stream, rest)
        # From now on only its end counts; what it sends is for later.
        self._poller.modify(fd, hung_up())

    def _forget(self, fd: int) -> None:
        """A rank that ended before the world was complete may come again."""
        for peer, (stream, _) in list(self.found.items()):
            if stream.fd == fd:
                logger.warning("rank %d: rank %d went away before the world was complete", self._rank, peer)
                self._poller.unregister(fd)
                stream.close()
                del self.found[peer]

    def _drop(self, fd: int, reason: str) -> None:
        stream, _, _ = self._waiting.pop(fd)
        logger.warning("rank %d: dropped a connection from %s: %s", self._rank, stream.peer, reason)
        self._poller.unregister(fd)
        stream.close()


def _not_formed(rank: int, deadline: Deadline, missing: list[int]) -> WorldNotFormed:
    names = f": missing ranks {', '.join(map(str, missing))}" if missing else " (the master did not send the table)"
    return WorldNotFormed(
        f"rank {rank}: the classic world did not form within {deadline.seconds:g} s{names}",
        missing=missing,
        seconds=deadline.seconds,
        rank=rank,
        operation="rendezvous",
    )
