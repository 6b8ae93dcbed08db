"""How a classic world forms: the star and the mesh of the classic wire. No authentication, but bounded in time.

A stray connection is dropped and logged, where ferrotorch would give up; a worker that comes before its master tries
again.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Iterator

from ..deadline import Deadline
from ..errors import ConfigError, InvalidRank, InvalidWorldSize, MissingVariable, ProtocolError, Timeout, WorldNotFormed
from ..transports.stream import Stream, StreamEnded, read_exactly, write_all
from ..transports.tcp import connect, listen
from ..types import Address
from ..wire import classic as wire

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
    return master if isinstance(master, Address) else Address.parse(master, what="master")


def form_star(rank: int, world_size: int, master: str | Address | None, deadline: Deadline) -> dict[int, Stream]:
    """The star: rank 0 gets a stream to each other rank, the others one to rank 0.

    Raises:
        InvalidRank, InvalidWorldSize: Before any socket is opened.
        WorldNotFormed: Not all came in time.
    """
    address = _check(rank, world_size, master)
    if rank != 0:
        stream = _connect(address, deadline, rank)
        write_all(stream, wire.pack_hello(rank), deadline, "hello")
        return {0: stream}
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
    bind = bind_addr if isinstance(bind_addr, Address) else Address.parse(bind_addr, what="bind_addr")
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
                stream = _connect(table[peer], deadline, rank, missing=peer)
                streams[peer] = stream
                write_all(stream, wire.pack_hello(rank), deadline, "hello")
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
        stream = _connect(master, deadline, rank)
        try:
            write_all(stream, wire.pack_hello(rank) + advertisement, deadline, "rendezvous")
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


def _connect(address: Address, deadline: Deadline, rank: int, missing: int = 0) -> Stream:
    while True:
        try:
            return connect(address, deadline, None)
        except StreamEnded as error:
            if deadline.remaining() <= RETRY_PAUSE:
                raise WorldNotFormed(
                    f"rank {rank} could not reach rank {missing} at {address} within {deadline.seconds:g} s: "
                    f"{error.reason}",
                    missing=[missing],
                    rank=rank,
                    operation="rendezvous",
                ) from None
        time.sleep(RETRY_PAUSE)


def _accept(
    listener: socket.socket, expected: set[int], size: int, deadline: Deadline, rank: int
) -> dict[int, tuple[Stream, bytes]]:
    """Waits until each expected rank has connected and said who it is; returns its stream and the rest of its hello."""
    import select

    found: dict[int, tuple[Stream, bytes]] = {}
    waiting: dict[int, tuple[Stream, bytearray, float]] = {}
    poller = select.poll()
    poller.register(listener, select.POLLIN)

    def drop(fd: int, reason: str) -> None:
        stream, _, _ = waiting.pop(fd)
        logger.warning("rank %d: dropped a connection from %s: %s", rank, stream.peer, reason)
        poller.unregister(fd)
        stream.close()

    try:
        while expected - found.keys():
            for fd, _ in poller.poll(deadline.sooner(0.5).poll_ms()):
                if fd == listener.fileno():
                    with contextlib.suppress(BlockingIOError, ConnectionError):
                        stream = Stream(listener.accept()[0])
                        if len(waiting) >= MAX_WAITING:
                            drop(next(iter(waiting)), "too many connections at once; it was the oldest")
                        waiting[stream.fd] = (stream, bytearray(), time.monotonic())
                        poller.register(stream.fd, select.POLLIN)
                    continue
                stream, data, _ = waiting[fd]
                chunk = bytearray(size - len(data))
                try:
                    count = stream.receive_into(memoryview(chunk))
                except StreamEnded as error:
                    drop(fd, error.reason)
                    continue
                data += chunk[:count]
                if len(data) < size:
                    continue
                try:
                    peer = wire.parse_peer_hello(data[: wire.HELLO_SIZE], rank, max(expected) + 1)
                except ProtocolError as error:
                    drop(fd, str(error))
                    continue
                if peer in found:
                    drop(fd, f"rank {peer} is here already")
                    continue
                poller.unregister(fd)
                del waiting[fd]
                found[peer] = (stream, bytes(data[wire.HELLO_SIZE :]))
            old = time.monotonic() - HELLO_TIME
            for fd in [fd for fd, (_, _, since) in waiting.items() if since < old]:
                drop(fd, f"no hello within {HELLO_TIME:g} s")
            if deadline.expired:
                raise _not_formed(rank, deadline, sorted(expected - found.keys()))
    except BaseException:
        for stream, _ in found.values():
            stream.close()
        raise
    finally:
        for stream, _, _ in waiting.values():
            stream.close()
    return found


def _not_formed(rank: int, deadline: Deadline, missing: list[int]) -> WorldNotFormed:
    names = f": missing ranks {', '.join(map(str, missing))}" if missing else " (the master did not send the table)"
    return WorldNotFormed(
        f"rank {rank}: the classic world did not form within {deadline.seconds:g} s{names}",
        missing=missing,
        rank=rank,
        operation="rendezvous",
    )
