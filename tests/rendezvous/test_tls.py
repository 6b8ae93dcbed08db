"""Worlds inside TLS 1.3: they form and talk, and nobody without the right certificate comes in or sits in between."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.ports import free_port
from tests.rendezvous.support import (
    FAST,
    LIMIT,
    LOOPBACK,
    TOKEN,
    Job,
    Ranks,
    Stranger,
    check,
    directory,
    eventually,
    lines_about,
    rank_hello,
    ranks,
)

from phalanx import Group, _native
from phalanx.config import Options, TlsOptions
from phalanx.deadline import Deadline
from phalanx.errors import AuthenticationFailed, ConfigError, WorldNotFormed
from phalanx.rendezvous.directory import Directory
from phalanx.rendezvous.join import dial
from phalanx.testing import run_ranks
from phalanx.types import Address

if TYPE_CHECKING:
    from tests.rendezvous.conftest import Authority

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made by the openssl command")


def with_tls(tls: TlsOptions | None) -> Options:
    return replace(FAST, tls=tls)


def start(group: Ranks, job: Job, tls: TlsOptions | None, rank: int, timeout: float = 30.0) -> None:
    group.start(job.launch(rank), options=with_tls(tls), timeout=timeout)


def client_context(tls: TlsOptions | None, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
    """A client that accepts any server and shows the certificate it has."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = version
    if tls is not None:
        context.load_cert_chain(tls.certificate, tls.key)
    return context


# -- it works ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", [LOOPBACK, "::1"])
@pytest.mark.parametrize("hosted_by", ["rank 0", "file"])
def test_a_world_inside_tls(tls: TlsOptions, host: str, hosted_by: str) -> None:
    job = Job(3, token=None) if hosted_by == "file" else Job(3, master=Address(host, free_port(host)))
    with ranks() as group:
        for rank in (2, 0, 1):
            start(group, job, tls, rank)
        check(group)


def shared_files() -> list[str]:
    """The memory that this process shares, as the kernel lists what it has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split()[-2] for line in lines if "memfd:phalanx" in line]


def talk(group: Group) -> tuple[str, bool, list[str]]:
    """Enough of it that messages would go over to a ring and collectives to a segment."""
    peer = 1 - group.rank
    x = group.empty(50_000, np.float32)
    for _ in range(8):
        x[:] = 1
        group.all_reduce(x)
        group.sendrecv(np.ones(100), peer, None, peer)
    return type(group._engine).__name__, bool((x == 2).all()), shared_files()


@pytest.mark.skipif(not _native.available, reason="no memory is shared without the core")
def test_no_memory_is_shared_inside_tls(tls: TlsOptions) -> None:
    apart = ("NetworkEngine", True, [])
    assert run_ranks(2, talk, backend="mesh", options=Options(tls=tls)) == [apart] * 2
    for engine, right, files in run_ranks(2, talk, backend="mesh", options=Options()):
        assert (engine, right) == ("SegmentEngine", True)
        assert {name.partition(":")[2] for name in files} == {"phalanx-segment", "phalanx-ring"}


def test_large_messages_both_ways(tls: TlsOptions) -> None:
    size = 3 << 20
    with directory(2, options=with_tls(tls)) as hosted, ranks() as group:
        for rank in range(2):
            start(group, Job(2, directory=hosted.address), tls, rank)

        def swap(backend: object) -> bytes:
            from phalanx.backends import MeshBackend

            assert isinstance(backend, MeshBackend)
            other = 1 - backend.rank
            got = bytearray(size)
            sender = threading.Thread(target=backend.send, args=(bytes([backend.rank]) * size, other))
            sender.start()
            backend.recv(got, other)
            sender.join(LIMIT)
            return bytes(got)

        assert group.every(swap) == [b"\1" * size, b"\0" * size]


def test_each_rank_with_a_certificate_of_its_own(authority: Authority) -> None:
    with directory(3, options=with_tls(authority.certificate("directory"))) as hosted, ranks() as group:
        for rank in range(3):
            start(group, Job(3, directory=hosted.address), authority.certificate(f"rank-{rank}"), rank)
        check(group)


def test_certificate_and_key_in_one_file(tls: TlsOptions, tmp_path: Path) -> None:
    """The key first, and more certificates behind: the first certificate counts."""
    bundle = tmp_path / "bundle.pem"
    bundle.write_text(Path(tls.key).read_text() + Path(tls.certificate).read_text() + Path(tls.ca).read_text())
    bundled = TlsOptions(certificate=str(bundle), key=str(bundle), ca=tls.ca)
    with directory(2, options=with_tls(bundled)) as hosted, ranks() as group:
        for rank in range(2):
            start(group, Job(2, directory=hosted.address), bundled, rank)
        check(group)


# -- strangers ---------------------------------------------------------------------------------------------------------


def refused(hosted: Directory, context: ssl.SSLContext) -> str:
    """Knocks with TLS; returns the name under which the directory saw it."""
    with socket.create_connection(hosted.address, timeout=LIMIT) as plain:
        name = "{}:{}".format(*plain.getsockname())
        with contextlib.suppress(ssl.SSLError, ConnectionError), context.wrap_socket(plain) as wrapped:
            hello = replace(rank_hello(1, 2), port=hosted.address.port)
            wrapped.sendall(hello.pack(secret=True, nonce=bytes(32)))
            assert wrapped.recv(1) == b"", "it was answered"
    return name


@pytest.mark.parametrize("kind", ["no certificate", "another authority", "TLS 1.2", "plain text", "silence", "junk"])
def test_strangers(kind: str, tls: TlsOptions, other_tls: TlsOptions, caplog: pytest.LogCaptureFixture) -> None:
    with directory(2, options=with_tls(tls)) as hosted, ranks() as group:
        job = Job(2, directory=hosted.address)
        start(group, job, tls, 0)
        if kind == "no certificate":
            name = refused(hosted, client_context(None))
        elif kind == "another authority":
            name = refused(hosted, client_context(other_tls))
        elif kind == "TLS 1.2":
            name = refused(hosted, client_context(tls, ssl.TLSVersion.TLSv1_2))
        else:
            with Stranger(hosted.address) as stranger:
                name = stranger.name
                if kind == "plain text":
                    stranger.send(rank_hello(1, 2).pack(secret=True, nonce=bytes(32)))
                elif kind == "junk":
                    stranger.send(b"\x16\x03\x01\xff\xff" + b"\xff" * 70_000)
                stranger.dropped()
        eventually(lambda: lines_about(caplog, name), "the log line")
        start(group, job, tls, 1)
        check(group)
        (line,) = lines_about(caplog, name)
    assert "TLS: " in line or "no handshake within" in line


def test_the_certificate_is_no_token(tls: TlsOptions) -> None:
    with directory(2, options=with_tls(tls)) as hosted, ranks() as group:
        job = Job(2, directory=hosted.address, token=b"another")
        start(group, job, tls, 1)
        assert isinstance(group.error(1), AuthenticationFailed)


@pytest.mark.parametrize("kind", ["another authority", "TLS here only", "TLS there only"])
def test_a_rank_that_does_not_fit(kind: str, tls: TlsOptions, other_tls: TlsOptions) -> None:
    mine = {"another authority": other_tls, "TLS here only": tls, "TLS there only": None}[kind]
    theirs = None if kind == "TLS here only" else tls
    with directory(2, options=with_tls(theirs)) as hosted, ranks() as group:
        job = Job(2, directory=hosted.address)
        start(group, job, theirs, 0, timeout=1.5)
        start(group, job, mine, 1, timeout=1.5)
        error, missing = group.error(1), group.error(0)
    assert isinstance(error, WorldNotFormed)
    assert "TLS" in str(error) or "no answer" in str(error)
    assert isinstance(missing, WorldNotFormed)
    assert missing.missing == (1,)


def test_a_server_of_another_authority_learns_nothing(tls: TlsOptions, other_tls: TlsOptions) -> None:
    """The client leaves before it says a word of the handshake."""
    with directory(2, options=with_tls(other_tls)) as hosted, ranks() as group:
        start(group, Job(2, directory=hosted.address), tls, 1, timeout=0.6)
        error = group.error(1)
        assert hosted._ranks == {}
    assert isinstance(error, WorldNotFormed)
    assert "CERTIFICATE_VERIFY_FAILED" in str(error)


# -- somebody in between -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def between(source: Address, target: Address, tls: TlsOptions) -> Iterator[list[bytes]]:
    """Ends TLS on both sides with a certificate that the job's authority has signed, and passes on what is inside."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tls.certificate, tls.key)
    heard: list[bytes] = []

    def serve(listener: socket.socket) -> None:
        with (
            contextlib.suppress(OSError),
            server.wrap_socket(listener.accept()[0], server_side=True) as victim,
            client_context(tls).wrap_socket(socket.create_connection(target)) as onward,
        ):
            for sender, receiver, size in ((victim, onward, 76), (onward, victim, 40)) * 2:
                data = sender.recv(size)  # a message of the handshake is one record
                heard.append(data)
                receiver.sendall(data)

    with socket.create_server(source) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        try:
            yield heard
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(LIMIT)


@pytest.mark.parametrize("same", [False, True], ids=["another certificate", "the stolen one"])
def test_somebody_in_between_with_a_good_certificate(authority: Authority, tls: TlsOptions, same: bool) -> None:
    """Another holder of a certificate cannot pass the proof on. Only who has the server's own key could."""
    with directory(1, options=Options(tls=tls, handshake_timeout=20)) as hosted:
        impostor = tls if same else authority.certificate("impostor")
        trap = Address("127.0.0.2", hosted.address.port)  # the same port, so that only the certificate tells
        with between(trap, hosted.address, impostor) as heard:
            options = Options(tls=authority.certificate("victim"), handshake_timeout=20)
            if same:
                dial([trap], rank_hello(0, 1), TOKEN, options, Deadline(20), who="the directory").close()
            else:
                with pytest.raises(AuthenticationFailed):
                    dial([trap], rank_hello(0, 1), TOKEN, options, Deadline(20), who="the directory")
            assert b"PHALANX\n" in b"".join(heard)


# -- files -------------------------------------------------------------------------------------------------------------


def broken(tls: TlsOptions, other: TlsOptions, folder: Path) -> dict[str, TlsOptions]:
    junk = folder / "junk.pem"
    junk.write_text("-----BEGIN NOTHING-----\n")
    missing = str(folder / "missing.pem")
    return {
        "no certificate": replace(tls, certificate=missing),
        "no key": replace(tls, key=missing),
        "no authority": replace(tls, ca=missing),
        "another key": replace(tls, key=other.key),
        "junk certificate": replace(tls, certificate=str(junk)),
        "junk authority": replace(tls, ca=str(junk)),
        "a folder": replace(tls, certificate=str(folder)),
    }


@pytest.mark.parametrize(
    "kind",
    ["no certificate", "no key", "no authority", "another key", "junk certificate", "junk authority", "a folder"],
)
def test_files_that_cannot_be_used(kind: str, tls: TlsOptions, other_tls: TlsOptions, tmp_path: Path) -> None:
    wrong = broken(tls, other_tls, tmp_path)[kind]
    with pytest.raises(ConfigError, match="TLS files cannot be used") as caught:
        Directory(2, token=TOKEN, bind=Address(LOOPBACK, 0), options=with_tls(wrong))
    for path in (wrong.certificate, wrong.key, wrong.ca):
        assert path in str(caught.value)
    with ranks() as group:
        start(group, Job(2, directory=Address(LOOPBACK, 1)), wrong, 1, timeout=60)
        assert isinstance(group.error(1), ConfigError)
