"""The first messages between the ranks of a classic world. No I/O.

```
star hello       rank u64
mesh hello       rank u64, advertisement                  advertisement: four octets of IPv4, port u16
table            one advertisement per rank
peer hello       rank u64
```

All integers are little endian.
"""

from __future__ import annotations

import ipaddress
import struct

from phalanx.errors import ConfigError, ProtocolError
from phalanx.types import Address

from .frames import Buffer

__all__ = [
    "ADVERTISEMENT_SIZE",
    "HELLO_SIZE",
    "pack_advertisement",
    "pack_hello",
    "parse_advertisement",
    "parse_peer_hello",
    "parse_table",
]

_RANK = struct.Struct("<Q")
_PORT = struct.Struct("<H")

HELLO_SIZE = _RANK.size
ADVERTISEMENT_SIZE = 4 + _PORT.size


def pack_hello(rank: int) -> bytes:
    """The first bytes of a rank, to rank 0 of the star and to a peer of the mesh."""
    return _RANK.pack(rank)


def parse_peer_hello(data: Buffer, own_rank: int, world_size: int) -> int:
    """The rank that connected to the peer listener of `own_rank`.

    Raises:
        ProtocolError: It is not above the own rank and below the world size.
    """
    return _rank(data, own_rank + 1, world_size)


def _rank(data: Buffer, lowest: int, world_size: int) -> int:
    if len(data) != HELLO_SIZE:
        raise ProtocolError(f"a hello has {len(data)} bytes (expected {HELLO_SIZE})")
    rank: int = _RANK.unpack(data)[0]
    if not lowest <= rank < world_size:
        valid = f"expected {lowest} to {world_size - 1}" if lowest < world_size else "none is expected"
        raise ProtocolError(f"a connection claims rank {rank}, which is not valid here ({valid})")
    return rank


def pack_advertisement(address: Address) -> bytes:
    """The 6 bytes that say where a rank can be reached.

    Raises:
        ConfigError: The host is no IPv4 address, or the port cannot be connected to.
    """
    try:
        octets = ipaddress.IPv4Address(address.host).packed
    except ValueError:
        raise ConfigError(
            f"{address} cannot be advertised on the classic wire, which has room for an IPv4 address only "
            "(bind an IPv4 address, or use wire='phalanx', which knows IPv6 and names)"
        ) from None
    if not 0 < address.port < 1 << 16:
        raise ConfigError(f"{address} cannot be advertised on the classic wire (expected a port from 1 to 65535)")
    return octets + _PORT.pack(address.port)


def parse_advertisement(data: Buffer) -> Address:
    """The address at which another rank says that it can be reached.

    Raises:
        ProtocolError: There are not 6 bytes, or the port is 0.
    """
    if len(data) != ADVERTISEMENT_SIZE:
        raise ProtocolError(f"an advertisement has {len(data)} bytes (expected {ADVERTISEMENT_SIZE})")
    host = str(ipaddress.IPv4Address(bytes(data[:4])))
    (port,) = _PORT.unpack(data[4:])
    if port == 0:
        raise ProtocolError(f"an advertisement of {host} has port 0 (expected 1 to 65535)")
    return Address(host, port)


def parse_table(data: Buffer, world_size: int) -> list[Address]:
    """The addresses of all ranks, in rank order.

    Raises:
        ProtocolError: The table is not one of `world_size` advertisements.
    """
    if len(data) != world_size * ADVERTISEMENT_SIZE:
        raise ProtocolError(
            f"a table has {len(data)} bytes (expected {world_size * ADVERTISEMENT_SIZE} for {world_size} ranks)"
        )
    return [parse_advertisement(data[at : at + ADVERTISEMENT_SIZE]) for at in range(0, len(data), ADVERTISEMENT_SIZE)]
