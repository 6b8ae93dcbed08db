"""Offers of shared memory that are none: a rank maps nothing that is not what was meant, and touches nothing else."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

import pytest

from phalanx import _native
from phalanx.group.engines import segment_setup
from phalanx.transports import shared_memory
from phalanx.transports.shared_memory import NotTheMemory, make_memory, open_memory
from phalanx.tuning import DEFAULTS

pytestmark = pytest.mark.skipif(not _native.available, reason="the segment needs the core (PHALANX_PURE is set)")

NONCE = b"n" * 16
HEAP = 1 << 20


def size() -> int:
    assert _native.core is not None
    return _native.core.segment_bytes(2, segment_setup.SLOT, HEAP)


def offer(
    fd: int,
    nonce: bytes = NONCE,
    slot: int = segment_setup.SLOT,
    heap: int = HEAP,
    pid: int | None = None,
    **settings: int,
) -> bytes:
    maker = os.getpid() if pid is None else pid
    agreed = (asdict(DEFAULTS) | settings).values()
    return segment_setup._OFFER.pack(True, maker, fd, slot, heap, *agreed, False, 0, 0, nonce)


def _unsealed() -> int:
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size())
    os.pwrite(fd, NONCE, 0)
    return fd


def _sealed(fd: int) -> int:
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, shared_memory.SEALS)
    return fd


def _wrong_size() -> int:
    fd = _unsealed()
    os.ftruncate(fd, size() - 1)
    return _sealed(fd)


def _wrong_nonce() -> int:
    fd = _unsealed()
    os.pwrite(fd, b"m", 15)
    return _sealed(fd)


def _file() -> int:
    fd, name = tempfile.mkstemp()
    os.unlink(name)
    os.ftruncate(fd, size())
    os.pwrite(fd, NONCE, 0)
    return fd


@contextmanager
def held(make: Callable[[], int]) -> Iterator[int]:
    fd = make()
    try:
        yield fd
    finally:
        os.close(fd)


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_what_is_meant_is_mapped() -> None:
    fd, words = segment_setup._make(2, 2, (0, 0), HEAP, DEFAULTS)
    with held(lambda: fd):
        assert segment_setup._open(words, 1, 2) is not None


@pytest.mark.parametrize(
    "make",
    [_unsealed, _wrong_size, _wrong_nonce, _file, lambda: os.open("/", os.O_RDONLY), lambda: os.open("/dev/null", 2)],
)
def test_something_else_is_not_mapped(make: Callable[[], int]) -> None:
    with held(make) as fd:
        before = open_files()
        with pytest.raises(NotTheMemory, match=f"descriptor {fd} of process {os.getpid()}"):
            segment_setup._open(offer(fd), 1, 2)
        assert open_files() == before


def test_a_pipe_is_not_even_opened() -> None:
    reader, writer = os.pipe()
    os.close(writer)
    with held(lambda: reader), pytest.raises(NotTheMemory):  # to open it for writing would wait, or succeed
        segment_setup._open(offer(reader), 1, 2)


def test_memory_of_another_user_is_not_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    fd, nonce = make_memory("phalanx-test", 4096)
    with held(lambda: fd):
        os.close(open_memory(os.getpid(), fd, 4096, nonce))
        monkeypatch.setattr(shared_memory.os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(NotTheMemory, match="belongs to user"):
            open_memory(os.getpid(), fd, 4096, nonce)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ({"fd": 999}, "No such file"),
        ({"fd": 3, "pid": 0}, "No such file"),
        ({"fd": 3, "pid": 2**60}, "No such file"),
        ({"fd": 2**60}, "No such file"),
        ({"fd": 3, "slot": 4096}, "invalid sizes: slots of 4096"),
        ({"fd": 3, "heap": 2**60}, "invalid sizes"),
        ({"fd": 3, "reduced_by_all": 2**40}, "invalid tuning: reduced_by_all"),
        ({"fd": 3, "spins": 0}, "invalid tuning: spins"),
        ({"fd": 3, "copy_once_from": 0}, "invalid tuning: copy_once_from"),
    ],
)
def test_an_offer_that_cannot_be_is_an_error_of_the_system(words: dict[str, int], problem: str) -> None:
    with pytest.raises(OSError, match=problem):
        segment_setup._open(offer(**words), 1, 2)  # type: ignore[arg-type]


def test_no_offer_at_all() -> None:
    with pytest.raises(OSError, match="could not make any"):
        segment_setup._open(bytes(segment_setup._OFFER.size), 1, 2)


def test_two_memories_are_told_apart() -> None:
    (first, nonce), (second, _) = make_memory("phalanx-test", 4096), make_memory("phalanx-test", 4096)
    with held(lambda: first), held(lambda: second):
        with pytest.raises(NotTheMemory, match="other memory"):
            open_memory(os.getpid(), second, 4096, nonce)
        with pytest.raises(PermissionError):  # nobody can cut it off
            os.ftruncate(first, 0)
