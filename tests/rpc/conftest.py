"""Where remote calls are tested: the same tests over shared memory, over TCP, and between threads."""

from __future__ import annotations

import subprocess

import pytest
from tests.rpc.support import WORLDS

from phalanx import Options, TlsOptions


@pytest.fixture(params=["rings", "tcp", "simulated"])
def where(request: pytest.FixtureRequest) -> str:
    """The kind of world, for `support.run`."""
    return str(request.param)


@pytest.fixture(params=["rings", "tcp"])
def processes(request: pytest.FixtureRequest) -> str:
    """The same, where ranks have to be processes."""
    return str(request.param)


@pytest.fixture(params=["rings", "tcp", "pure", "tls"])
def stream(request: pytest.FixtureRequest) -> str:
    """The same for what has to do with how frames are read and written: rings, sockets, pipes in Python, TLS."""
    kind = str(request.param)
    if kind == "tls":
        WORLDS["tls"] = ("mesh", {"options": Options(tls=request.getfixturevalue("tls"))})
    return kind


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TlsOptions:
    """A certificate that is its own authority, made by the `openssl` command."""
    folder = tmp_path_factory.mktemp("tls")
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=rank -days 2"
    files = ["-keyout", "rank.key", "-out", "rank.pem"]
    subprocess.run(["openssl", *words.split(), *files], cwd=folder, check=True, capture_output=True, timeout=60)
    certificate = str(folder / "rank.pem")
    return TlsOptions(certificate=certificate, key=str(folder / "rank.key"), ca=certificate)
