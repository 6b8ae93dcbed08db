"""What `phalanx doctor` says of GPUs and NCCL, with stand-ins for both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.gpu.fake import FakeDriver, install
from tests.gpu.fake_nccl import install_nccl

from phalanx.cli.doctor import gpus as gpu_checks
from phalanx.cli.doctor.findings import Severity, Situation
from phalanx.cli.doctor.gpus import gpus
from phalanx.cli.doctor.nccl import nccl_library
from phalanx.config import detect
from phalanx.cuda.driver import CudaError
from phalanx.cuda.nccl import use_nccl
from phalanx.errors import BackendUnavailable


@pytest.fixture(autouse=True)
def plain_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_checks, "_MPS", tmp_path / "no-mps")
    monkeypatch.setattr(gpu_checks, "_CONTAINER", (tmp_path / "container",))


def two_gpus(fake: FakeDriver, *, peers: bool = True) -> None:
    fake.device_count = 2
    fake.reaches = lambda device, other: peers  # type: ignore[attr-defined]


def missing() -> Any:
    raise BackendUnavailable("nccl4py is not installed (pip install nccl4py)")


def ranks(count: int, **env: str) -> Situation:
    launch = detect(
        rank=0, world_size=count, master="127.0.0.1:1", env={"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(count)}
    )
    return Situation(launch=launch, env=env)


def test_one_gpu() -> None:
    install()
    use_nccl(missing)
    (found,) = gpus(Situation())
    assert found.found == (
        "1 × Fake, CUDA 13.0; ranks that share one: by one kernel, which reads the arrays of all ranks (up to 64 KiB "  # noqa: RUF001
        "through the memory of the host, unless the GPU is idle)"
    )
    (found,) = nccl_library(Situation())
    assert (found.status, "with one GPU on one host nothing needs it" in found.found) == (Severity.OK, True)


def test_two_gpus_with_and_without_nccl(tmp_path: Path) -> None:
    fake = install()
    two_gpus(fake)
    install_nccl(fake, tmp_path)
    (found,) = gpus(Situation())
    assert found.found.endswith("; ranks of this host with one each: by NCCL")
    (found,) = nccl_library(Situation())
    assert found.found == "NCCL 2.32.3 by nccl4py, for collectives of ranks with a GPU each"
    use_nccl(missing)
    (found,) = gpus(Situation())
    assert found.found.endswith("with one each: through the shared memory of the host, by copy engines")
    (found,) = nccl_library(Situation())
    assert (found.status, "pip install nccl4py" in found.found) == (Severity.WARNING, True)
    assert found.advice


def test_more_ranks_than_gpus(tmp_path: Path) -> None:
    fake = install()
    install_nccl(fake, tmp_path, version=22809)
    _, found = nccl_library(ranks(2))
    assert (found.status, "2 ranks share 1 GPU, which NCCL refuses" in found.found) == (Severity.OK, True)
    told = ranks(2, NCCL_MULTI_RANK_GPU_ENABLE="1")
    _, found = nccl_library(told)
    assert (found.status, "NCCL 2.28.9 does not know it" in found.found) == (Severity.WARNING, True)
    install_nccl(fake, tmp_path, version=23003)
    _, found = nccl_library(told)
    assert (found.status, "which NCCL was told to take" in found.found) == (Severity.OK, True)


def test_what_makes_it_slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install()
    use_nccl(missing)
    two_gpus(fake, peers=False)

    def refuse(_base: int) -> bytes:
        raise CudaError("cuIpcGetMemHandle", 801, "CUDA_ERROR_NOT_SUPPORTED")

    monkeypatch.setattr(fake, "export", refuse)
    (tmp_path / "container").touch()
    found = list(
        gpus(Situation(env={"CUDA_MPS_PIPE_DIRECTORY": "/x", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}))
    )
    words = [
        "CUDA 13.0",
        "expandable_segments",
        "MPS is in use",
        "container",
        "CUDA IPC",
        "no peer access between GPUs 0 and 1",
    ]
    assert [word in one.found for word, one in zip(words, found, strict=True)] == [True] * len(words)


def test_without_a_gpu() -> None:
    class NoDriver:
        @property
        def device_count(self) -> int:
            raise BackendUnavailable("there is no driver")

        def device_name(self, device: int) -> str:
            raise AssertionError

    from phalanx.cuda.driver import use_driver

    use_driver(NoDriver())
    assert list(nccl_library(Situation())) == []
    (found,) = gpus(Situation())
    assert "arrays on a GPU cannot be sent from here: there is no driver" in found.found
