"""Every test of the rendezvous has a runtime folder of its own, no launcher's variables, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.rendezvous.support import eventually, open_sockets

from phalanx.config import TlsOptions

FOREIGN = ("PHALANX_", "TORCHELASTIC_", "OMPI_", "PMI_", "PMIX_", "SLURM_", "MASTER_", "LOCAL_", "MPI_")


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for private files."""
    for name in os.environ:
        if name.startswith(FOREIGN) or name in ("RANK", "WORLD_SIZE", "GROUP_RANK"):
            monkeypatch.delenv(name)
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder


@pytest.fixture(autouse=True)
def nothing_left(runtime: Path) -> Iterator[None]:
    """No thread, socket or file is left of a world."""
    before = open_sockets()
    yield
    eventually(
        lambda: not [t.name for t in threading.enumerate() if t.name.startswith("phalanx")], "threads to end", 10
    )
    eventually(lambda: open_sockets() <= before, f"sockets to be closed: {open_sockets() - before}", 10)
    assert [path.name for path in runtime.iterdir()] == []


class Authority:
    """A certificate authority made with the `openssl` command."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self._run("req", "-x509", "-subj", f"/CN={folder.name} authority", "-keyout", "ca.key", "-out", "ca.pem")

    def _run(self, *arguments: str) -> None:
        keys = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes") if arguments[0] == "req" else ()
        command = ["openssl", *arguments, *keys, *(("-days", "2") if "-x509" in arguments else ())]
        subprocess.run(command, cwd=self.folder, check=True, capture_output=True, timeout=60)

    def certificate(self, name: str) -> TlsOptions:
        """A certificate that this authority has signed."""
        self._run("req", "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
        self._run("x509", "-req", "-in", f"{name}.csr", *signing, "-out", f"{name}.pem")
        path = self.folder / name
        return TlsOptions(certificate=f"{path}.pem", key=f"{path}.key", ca=str(self.folder / "ca.pem"))


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The authority of the job."""
    return Authority(tmp_path_factory.mktemp("tls") / "job")


@pytest.fixture(scope="session")
def tls(authority: Authority) -> TlsOptions:
    """The certificate of the job."""
    return authority.certificate("rank")


@pytest.fixture(scope="session")
def other_tls(tmp_path_factory: pytest.TempPathFactory) -> TlsOptions:
    """A certificate of somebody else's authority."""
    return Authority(tmp_path_factory.mktemp("tls") / "other").certificate("stranger")
