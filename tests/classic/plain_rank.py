"""A classic rank with plain sockets, straight from the specification of the classic wire. It knows nothing of Phalanx.

All integers are little endian. Everything blocks, with one time limit for all.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable

LIMIT = 20.0
"""Seconds that nothing here needs: whoever waits so long has failed."""

Place = tuple[str, int]


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def read(sock: socket.socket, size: int) -> bytes:
    """Exactly so many bytes.

    Raises:
        EOFError: The other side closed before.
    """
    data = b""
    while len(data) < size:
        chunk = sock.recv(size - len(data))
        if not chunk:
            raise EOFError(f"{len(data)} of {size} bytes")
        data += chunk
    return data


def connect(place: Place) -> socket.socket:
    """Connects, every 50 ms until somebody listens."""
    end = time.monotonic() + LIMIT
    while True:
        try:
            sock = socket.create_connection(place, LIMIT)
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
            continue
        if sock.getsockname() == sock.getpeername():  # a free port that met itself
            sock.close()
            continue
        sock.settimeout(LIMIT)
        return sock


def listen(place: Place) -> socket.socket:
    listener = socket.create_server(place)
    listener.settimeout(LIMIT)
    return listener


def accept(listener: socket.socket) -> socket.socket:
    sock, _ = listener.accept()
    sock.settimeout(LIMIT)
    return sock


def advertise(place: Place) -> bytes:
    """Four octets of IPv4, then the port as u16."""
    return socket.inet_aton(place[0]) + struct.pack("<H", place[1])


class PlainRank:
    """A rank that is connected: messages are a u64 length and the bytes."""

    def __init__(
        self, rank: int, world_size: int, connections: dict[int, socket.socket], *, is_mesh: bool = False
    ) -> None:
        self.is_mesh = is_mesh
        self.rank = rank
        self.world_size = world_size
        self.connections = connections

    def send(self, data: bytes, dst: int) -> None:
        self.connections[dst].sendall(u64(len(data)) + data)

    def recv(self, src: int) -> bytes:
        """The next message, whatever its length."""
        sock = self.connections[src]
        (length,) = struct.unpack("<Q", read(sock, 8))
        return read(sock, length)

    def barrier(self, members: list[int] | None = None) -> None:
        """Of the whole mesh: a message that goes round twice.

        Else over the first member: it hears from each in order, then answers each in order.
        """
        if self.is_mesh and members is None:
            after, before = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size
            for _ in range(2):
                if self.rank == 0:
                    self.send(b"\0", after)
                assert self.recv(before) == b"\0"
                if self.rank != 0:
                    self.send(b"\0", after)
            return
        first, *others = members if members is not None else range(self.world_size)
        if self.rank == first:
            for rank in others:
                assert self.recv(rank) == b"\0"
            for rank in others:
                self.send(b"\0", rank)
        else:
            self.send(b"\0", first)
            assert self.recv(first) == b"\0"

    def close(self) -> None:
        for sock in self.connections.values():
            sock.close()


def star(rank: int, world_size: int, master: Place) -> PlainRank:
    """The star: rank 0 listens, each other rank connects and sends its rank as a u64."""
    if rank != 0:
        sock = connect(master)
        sock.sendall(u64(rank))
        return PlainRank(rank, world_size, {0: sock})
    connections: dict[int, socket.socket] = {}
    with listen(master) as listener:
        while len(connections) < world_size - 1:
            sock = accept(listener)
            (peer,) = struct.unpack("<Q", read(sock, 8))
            assert 0 < peer < world_size
            connections[peer] = sock
    return PlainRank(0, world_size, connections)


def mesh(rank: int, world_size: int, master: Place, *, meanwhile: Callable[[Place], None] | None = None) -> PlainRank:
    """The mesh: everybody tells rank 0 where it listens, rank 0 tells everybody, higher ranks connect to lower ones.

    `meanwhile` gets the place where this rank listens, before it accepts anybody, and after rank 0 knows of it.
    """
    with listen(("127.0.0.1", 0)) as listener:
        mine = advertise(listener.getsockname())
        if rank == 0:
            table = _master_table(world_size, master, mine)
        else:
            with connect(master) as sock:
                sock.sendall(u64(rank) + mine)
                if meanwhile is not None:
                    meanwhile(listener.getsockname())
                table = read(sock, 6 * world_size)
        connections: dict[int, socket.socket] = {}
        while len(connections) < world_size - 1 - rank:
            sock = accept(listener)
            (peer,) = struct.unpack("<Q", read(sock, 8))
            assert rank < peer < world_size
            connections[peer] = sock
    for peer in range(rank):
        octets, port = table[6 * peer : 6 * peer + 4], table[6 * peer + 4 : 6 * peer + 6]
        sock = connect((socket.inet_ntoa(octets), struct.unpack("<H", port)[0]))
        sock.sendall(u64(rank))
        connections[peer] = sock
    return PlainRank(rank, world_size, connections, is_mesh=True)


def _master_table(world_size: int, master: Place, mine: bytes) -> bytes:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listen(master))
        asking: dict[int, tuple[socket.socket, bytes]] = {}
        while len(asking) < world_size - 1:
            sock = stack.enter_context(accept(listener))
            (peer,) = struct.unpack("<Q", read(sock, 8))
            assert 0 < peer < world_size
            asking[peer] = (sock, read(sock, 6))
        table = mine + b"".join(asking[peer][1] for peer in sorted(asking))
        for sock, _ in asking.values():
            sock.sendall(table)
    return table
