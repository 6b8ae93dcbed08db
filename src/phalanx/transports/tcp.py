"""Opening and accepting TCP connections: addresses, listeners, TLS contexts."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import ipaddress
import os
import random
import re
import select
import socket
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..deadline import Deadline
from ..errors import ConfigError, NoConnection, PhalanxError
from ..types import Address
from .stream import ConnectionRefused, Stream, StreamEnded, TlsStream, no_check, wait_ready

if TYPE_CHECKING:
    import ssl

    from ..config.options import TlsOptions
    from ..wire.hosting import Tls

__all__ = ["connect", "free_port", "is_loopback", "listen", "resolve", "route_to", "server_stream"]

BACKLOG = 1024
UNASSIGNED = range(20_000, 32_000)
"""Ports below those that Linux hands out."""

_connections: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""Sockets that `connect` has opened. A thread may still shake hands on one: then nobody else knows of it yet."""


def _close_in_forked_child() -> None:
    """Closes the child's copies: the other side would not see the end of the parent."""
    for sock in list(_connections):
        sock.close()
    _connections.clear()


os.register_at_fork(after_in_child=_close_in_forked_child)


def resolve(address: Address, *, passive: bool = False) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
    """All addresses of a host, in the resolver's order.

    Raises:
        NoConnection: The name cannot be resolved.
    """
    flags = socket.AI_PASSIVE if passive else 0
    try:
        found = socket.getaddrinfo(address.host or None, address.port, type=socket.SOCK_STREAM, flags=flags)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise NoConnection(
            f"the host name {address.host!r} cannot be resolved: {why} (is it spelt right, and known on this host?)"
        ) from None
    # IPv6 link-local addresses need the scope, so the whole sockaddr is kept.
    return [(family, sockaddr) for family, _, _, _, sockaddr in found]  # type: ignore[misc]


def is_loopback(host: str) -> bool:
    """True if an address (not a name) exists inside one machine only."""
    try:
        return ipaddress.ip_address(host.split("%", maxsplit=1)[0]).is_loopback
    except ValueError:
        return False


def route_to(address: Address) -> str:
    """The address of the local interface that routes to `address`. Nothing is sent.

    Raises:
        NoConnection: There is no route.
    """
    reason = "no address"
    for family, sockaddr in resolve(Address(address.host, address.port or 9)):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(sockaddr)
                return str(probe.getsockname()[0])
            except OSError as error:
                reason = str(error)
    raise NoConnection(f"there is no route to {address.host}: {reason}")


def free_port(host: str = "127.0.0.1") -> int:
    """A port for another program to listen on soon.

    It is none of those that the kernel gives to connections and listeners, so nobody gets it by chance meanwhile.
    """
    for port in random.SystemRandom().sample(UNASSIGNED, 100):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise ConfigError(f"100 ports of {host} were tried, and none is free")


def listen(host: str, ports: range) -> socket.socket:
    """A listening socket on the first free port of `ports`. An empty host means all interfaces.

    Raises:
        ConfigError: The address is not one of this machine, or no port is free.
    """
    last = "no address"
    for port in ports:
        candidates = resolve(Address(host, port), passive=True)
        if not host and socket.has_dualstack_ipv6():
            candidates = [(socket.AF_INET6, ("::", port))]
        for family, sockaddr in candidates:
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                if port:  # not on a port of the kernel's choice: another such socket might take it from this one
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if not host else 1)
                sock.bind(sockaddr)
                sock.listen(BACKLOG)
                sock.setblocking(False)
                return sock
            except OSError as error:
                sock.close()
                last = error.strerror or str(error)
    where = f"{host or 'all interfaces'} port {ports[0]}" + (f" to {ports[-1]}" if len(ports) > 1 else "")
    raise ConfigError(f"cannot listen on {where}: {last}")


@functools.lru_cache(maxsize=8)
def _tls_context(options: TlsOptions | Tls, server: bool) -> ssl.SSLContext:
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # ranks are known by their job's CA and token, not by a host name
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(options.certificate, options.key)
        context.load_verify_locations(options.ca)
    except (OSError, ssl.SSLError) as error:
        names = f"certificate {options.certificate!r}, key {options.key!r}, CA {options.ca!r}"
        raise ConfigError(f"TLS files cannot be used ({names}): {error}") from None
    return context


@functools.lru_cache(maxsize=8)
def _own_certificate(path: str) -> bytes:
    """The hash of the first certificate in the file, as clients of this process see it."""
    import ssl

    with open(path, encoding="ascii", errors="replace") as file:
        found = re.search("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", file.read(), re.DOTALL)
    if found is None:
        raise ConfigError(f"the TLS certificate {path!r} is not a PEM file")
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(found[0])).digest()


def check_tls(options: TlsOptions | Tls | None) -> None:
    """Loads the files now, so that a wrong path is an error of the caller and not of a later connection.

    Raises:
        ConfigError: A file is missing or not what it should be.
    """
    if options is not None:
        _tls_context(options, True)
        _tls_context(options, False)
        _own_certificate(options.certificate)


def server_stream(sock: socket.socket, tls: TlsOptions | Tls | None) -> Stream:
    """The stream of an accepted connection; its TLS handshake is still to be done."""
    sock.setblocking(False)
    if tls is None:
        return Stream(sock)
    wrapped = _tls_context(tls, True).wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
    stream = TlsStream(wrapped)
    stream.binding = _own_certificate(tls.certificate)
    return stream


def connect(
    address: Address, deadline: Deadline, tls: TlsOptions | Tls | None, check: Callable[[], None] = no_check
) -> Stream:
    """Connects to the first address of the host that answers; each gets its share of the time.

    Args:
        check: Called while it waits; it may raise to end it.

    Raises:
        StreamEnded: There is no answer now; trying again may help. `ConnectionRefused` if no process listens there.
        NoConnection: The name cannot be resolved.
    """
    reason, refused = "no address", False
    found = resolve(address)
    for number, (family, sockaddr) in enumerate(found):
        share = deadline.sooner(deadline.remaining() / (len(found) - number))
        sock = socket.socket(family, socket.SOCK_STREAM)
        _connections.add(sock)
        try:
            sock.setblocking(False)
            _connect(sock, sockaddr, share, check)
            if tls is None:
                return Stream(sock)
            wrapped = _tls_context(tls, False).wrap_socket(sock, do_handshake_on_connect=False)
            _connections.add(wrapped)
            sock = wrapped
            stream = TlsStream(wrapped)
            while not stream.handshake():
                if not wait_ready(stream.fd, stream.read_events, share, check):
                    raise StreamEnded("no answer to the TLS handshake")
            stream.binding = hashlib.sha256(wrapped.getpeercert(binary_form=True) or b"").digest()
            return stream
        except StreamEnded as error:
            sock.close()
            reason = error.reason
        except PhalanxError:  # of `check`; some are also an OSError
            sock.close()
            raise
        except OSError as error:
            sock.close()
            reason = error.strerror or str(error)
            refused = isinstance(error, ConnectionRefusedError)
        except BaseException:
            sock.close()
            raise
    raise ConnectionRefused(reason) if refused else StreamEnded(reason)


def _connect(sock: socket.socket, sockaddr: tuple[str, int], deadline: Deadline, check: Callable[[], None]) -> None:
    try:
        sock.connect(sockaddr)
    except BlockingIOError:
        if not wait_ready(sock.fileno(), select.POLLOUT, deadline, check):
            raise StreamEnded("no answer") from None
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code)) from None
    # A free port can connect to itself when the kernel picks it as the source: that is no server.
    if sock.getsockname() == sock.getpeername():
        raise StreamEnded("connection refused")
