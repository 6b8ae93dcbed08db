"""A stand-in for NCCL that carries the bytes between processes by files, in a folder that its unique id names.

An operation is done by a thread, as a kernel would: it gives away what this rank has, waits for the other ranks, and
writes the result to the memory of the stand-in for the driver. Until then the stream is busy. Every function that is
called is recorded. A thread that waits for a rank which never comes ends only by an abort, as NCCL's kernels do.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tests.gpu.fake import FakeDriver, _at

from phalanx._native import divide_in_place, reduce_into
from phalanx.cuda.nccl import DTYPES, ID_BYTES, IN_PROGRESS, OPS, NcclError, use_nccl

_DTYPES = {number: name for name, number in DTYPES.items()}
_OPS = {number: name for name, number in OPS.items()}
PAUSE = 0.001


class _Aborted(Exception):
    """The communicator of an operation was aborted."""


class FakeComm:
    """One rank's part of a communicator."""

    def __init__(self, folder: Path, size: int, rank: int) -> None:
        self.folder, self.size, self.rank = folder, size, rank
        self.aborted = threading.Event()
        self.ended = self.is_finalized = False
        self.polls = 2
        """Looks at the state after each call that still find it in progress."""
        self.collectives = 0
        self.messages: Counter[tuple[int, int]] = Counter()
        """By sender and receiver."""

    def put(self, name: str, data: bytes) -> None:
        """Gives away bytes under a name, whole or not at all."""
        hidden = self.folder / f".{name}-{self.rank}"
        hidden.write_bytes(data)
        hidden.rename(self.folder / name)

    def wait_until(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            if self.aborted.is_set():
                raise _Aborted
            time.sleep(PAUSE)

    def take(self, name: str) -> bytes:
        """Waits for what a rank gives away."""
        path = self.folder / name
        self.wait_until(path.exists)
        return path.read_bytes()

    def write(self, address: int, data: bytes) -> None:
        """To the memory of the GPU, unless the communicator was aborted."""
        if self.aborted.is_set():
            raise _Aborted
        _at(address, len(data), np.dtype(np.uint8))[:] = np.frombuffer(data, np.uint8)


class FakeNccl:
    """As `Nccl`.

    Args:
        driver: The stand-in for the driver, whose memory it uses.
        folder: Where the ranks meet; the same on all of them.
    """

    def __init__(self, driver: FakeDriver, folder: Path, version: int = 23203) -> None:
        self.version = version
        self.calls: list[tuple[Any, ...]] = []
        """The functions that were called, with counts, roots and the like, and without addresses."""
        self.async_error = 0
        """The state of all communicators, if it is not 0."""
        self.on_enqueue: Callable[[str], None] = lambda name: None
        self.kernel_seconds = 0.0
        """Time that a kernel takes before it gives away anything."""
        self.on_init: Callable[[], None] = lambda: None
        self._driver = driver
        self._folder = folder
        self._group: list[tuple[FakeComm, int, Callable[[], None], Callable[[], None]]] | None = None

    # -- communicators -----

    def new_id(self) -> bytes:
        path = self._folder / uuid.uuid4().hex[:12]
        path.mkdir()
        return os.fsencode(path).ljust(ID_BYTES, b"\0")

    def start(self, size: int, rank: int, identity: bytes) -> FakeComm:
        self.on_init()
        self.calls.append(("start", size, rank))
        comm = FakeComm(Path(os.fsdecode(identity.rstrip(b"\0"))), size, rank)
        comm.put(f"here-{rank}", b"")
        return comm

    def state(self, comm: FakeComm) -> int:
        assert not comm.ended, "it was used after its end"
        if self.async_error:
            return self.async_error
        if len(list(comm.folder.glob("here-*"))) < comm.size:
            return IN_PROGRESS
        if comm.is_finalized and len(list(comm.folder.glob("ends-*"))) < comm.size:
            return IN_PROGRESS
        comm.polls -= 1
        return IN_PROGRESS if comm.polls >= 0 else 0

    def error_of(self, comm: FakeComm, code: int) -> NcclError:
        return NcclError(f"NCCL: fake error {code}")

    def abort(self, comm: FakeComm) -> None:
        self._end(comm, "abort")
        comm.aborted.set()

    def finalize(self, comm: FakeComm) -> None:
        self.calls.append(("finalize",))
        comm.polls = 2
        comm.put(f"ends-{comm.rank}", b"")
        comm.is_finalized = True

    def destroy(self, comm: FakeComm) -> None:
        self._end(comm, "destroy")

    def _end(self, comm: FakeComm, how: str) -> None:
        assert not comm.ended, "it was ended twice"
        comm.ended = True
        self.calls.append((how,))

    # -- operations -----

    def group_start(self) -> None:
        assert self._group is None
        self._group = []

    def group_end(self) -> None:
        assert self._group is not None
        group, self._group = self._group, None
        if group:
            self._launch(group)

    def _add(
        self, comm: FakeComm, stream: int, call: tuple[Any, ...], give: Callable[[], None], take: Callable[[], None]
    ) -> None:
        assert not comm.ended, "it was used after its end"
        assert comm.polls < 0, "NCCL was called while it was in progress"
        self.on_enqueue(call[0])
        self.calls.append(call)
        one = (comm, stream, give, take)
        if self._group is None:
            self._launch([one])
        else:
            self._group.append(one)

    def _launch(self, operations: list[tuple[FakeComm, int, Callable[[], None], Callable[[], None]]]) -> None:
        comm, stream = operations[0][:2]
        comm.polls = 2
        self._driver.held_streams.add(stream)

        def kernel() -> None:
            with contextlib.suppress(_Aborted):
                end = time.monotonic() + self.kernel_seconds
                comm.wait_until(lambda: time.monotonic() >= end)
                for _, _, give, _ in operations:
                    give()
                for _, _, _, take in reversed(operations):  # what was sent is gone when the others have received it
                    take()
            self._driver.held_streams.discard(stream)

        threading.Thread(target=kernel, daemon=True).start()

    def _collective(
        self, comm: FakeComm, stream: int, call: tuple[Any, ...], mine: tuple[int, int], finish: Callable[..., None]
    ) -> None:
        """All ranks give away their bytes, and finish with those of all."""
        comm.collectives += 1
        number, (address, size) = comm.collectives, mine

        def give() -> None:
            comm.put(f"{number}-{comm.rank}", repr(call).encode().ljust(64) + bytes(_at(address, size, _BYTE)))

        def take() -> None:
            found = [comm.take(f"{number}-{rank}") for rank in range(comm.size)]
            assert len({data[:64] for data in found}) == 1, [data[:64] for data in found]
            finish([data[64:] for data in found])

        self._add(comm, stream, call, give, take)

    def _reduced(self, parts: list[bytes], dtype: int, op: int) -> Any:
        name, step = _DTYPES[dtype], _OPS[op]
        storage = np.dtype(np.uint16 if name == "bfloat16" else name)
        arrays = [np.frombuffer(part, storage) for part in parts]
        total = arrays[0].copy()
        for other in arrays[1:]:
            reduce_into(
                total, other, "sum" if step == "mean" else step, dtype="bfloat16" if name == "bfloat16" else None
            )
        if step == "mean":
            divide_in_place(total, len(parts), dtype="bfloat16" if name == "bfloat16" else None)
        return total

    def all_reduce(self, comm: Any, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:
        size = count * _itemsize(dtype)
        self._collective(
            comm,
            stream,
            ("all_reduce", count, dtype, op),
            (source, size),
            lambda parts: comm.write(target, self._reduced(parts, dtype, op).tobytes()),
        )

    def reduce(
        self, comm: Any, source: int, target: int, count: int, dtype: int, op: int, root: int, stream: int
    ) -> None:
        def finish(parts: list[bytes]) -> None:
            if comm.rank == root:
                comm.write(target, self._reduced(parts, dtype, op).tobytes())

        call = ("reduce", count, dtype, op, root)
        self._collective(comm, stream, call, (source, count * _itemsize(dtype)), finish)

    def reduce_scatter(self, comm: Any, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:
        def finish(parts: list[bytes]) -> None:
            comm.write(target, self._reduced(parts, dtype, op)[comm.rank * count :][:count].tobytes())

        call = ("reduce_scatter", count, dtype, op)
        self._collective(comm, stream, call, (source, count * comm.size * _itemsize(dtype)), finish)

    def broadcast(self, comm: Any, source: int, target: int, count: int, root: int, stream: int) -> None:
        mine = (source, count if comm.rank == root else 0)
        self._collective(comm, stream, ("broadcast", count, root), mine, lambda parts: comm.write(target, parts[root]))

    def all_gather(self, comm: Any, source: int, target: int, count: int, stream: int) -> None:
        self._collective(
            comm, stream, ("all_gather", count), (source, count), lambda parts: comm.write(target, b"".join(parts))
        )

    def send(self, comm: Any, source: int, count: int, peer: int, stream: int) -> None:
        name = self._message(comm, comm.rank, peer)
        self._add(
            comm,
            stream,
            ("send", count, peer),
            lambda: comm.put(name, bytes(_at(source, count, _BYTE))),
            lambda: comm.wait_until(lambda: not (comm.folder / name).exists()),
        )

    def recv(self, comm: Any, target: int, count: int, peer: int, stream: int) -> None:
        name = self._message(comm, peer, comm.rank)

        def take() -> None:
            data = comm.take(name)
            assert len(data) == count
            comm.write(target, data)
            (comm.folder / name).unlink()

        self._add(comm, stream, ("recv", count, peer), lambda: None, take)

    def _message(self, comm: FakeComm, src: int, dst: int) -> str:
        comm.messages[src, dst] += 1
        return f"from-{src}-to-{dst}-{comm.messages[src, dst]}"


_BYTE = np.dtype(np.uint8)


def _itemsize(dtype: int) -> int:
    name = _DTYPES[dtype]
    return 2 if name == "bfloat16" else np.dtype(name).itemsize


def install_nccl(driver: FakeDriver, folder: Path, **options: Any) -> FakeNccl:
    """Puts the stand-in in NCCL's place, in this process."""
    made = FakeNccl(driver, folder, **options)
    use_nccl(lambda: made)
    return made
