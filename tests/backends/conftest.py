"""What the tests of backends share: certificates, and the rule that nothing is left of a world."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx import TlsOptions


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TlsOptions:
    """A certificate and the authority that signed it, made by the `openssl` command."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *new_key, "-subj", "/CN=authority", "-days", "2", "-keyout", "ca.key", "-out", "ca.pem")
    openssl("req", *new_key, "-subj", "/CN=rank", "-keyout", "rank.key", "-out", "rank.csr")
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
    openssl("x509", "-req", "-in", "rank.csr", *signing, "-out", "rank.pem")
    return TlsOptions(certificate=str(folder / "rank.pem"), key=str(folder / "rank.key"), ca=str(folder / "ca.pem"))


def open_sockets() -> set[str]:
    """The sockets that this process has open."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith("socket:"):
            found.add(target)
    return found


def phalanx_threads() -> list[str]:
    """Names of the threads that belong to a world."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("phalanx")]


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """No thread and no socket is left of a world."""
    before = open_sockets()
    yield
    end = time.monotonic() + 10
    while (phalanx_threads() or open_sockets() - before) and time.monotonic() < end:
        time.sleep(0.005)
    assert phalanx_threads() == []
    assert open_sockets() - before == set()
