"""Finds out, in a group's first collective on arrays of a GPU, whether its ranks share one: all ranks take part."""

from __future__ import annotations

import os
import struct

import numpy as np

from ....cuda.driver import CudaDriver, driver
from ....errors import PhalanxError
from ....transports.shared_memory import NONCE_BYTES
from ...running_collective import RunningCollective
from ..base import Engine
from ..segment import SegmentEngine
from .executor import EXECUTOR, Executor
from .flight import Flight
from .routing import Placement

__all__ = ["agree"]

_HELLO = struct.Struct(f"<?16sQQ{NONCE_BYTES}s")
"""Whether a rank can use its GPU, which one it is, its process, and its descriptor and nonce of the flight's file."""


def agree(running: RunningCollective, host: Engine, device: int) -> tuple[Placement, Executor | None]:
    """Where the ranks are, and what executes their collectives if they share a GPU.

    Raises:
        DeadlinePassed, FingerprintMismatch, PhalanxError: As every engine.
    """
    if not isinstance(host, SegmentEngine):
        return Placement(one_gpu=False, reason="the ranks do not share memory"), None
    flight: Flight | None = None
    known: CudaDriver | None = None
    hello = _HELLO.pack(False, b"", 0, 0, b"")
    try:
        known = driver()
        uuid = known.device_uuid(device)
        flight = Flight.make() if host.rank == EXECUTOR else None
        hello = _HELLO.pack(True, uuid, os.getpid(), flight.fd if flight else 0, flight.nonce if flight else b"")
    except (PhalanxError, OSError):
        pass  # told below: all ranks have to know
    try:
        everyone = [_HELLO.unpack(word) for word in _tell_all(running, host, hello)]
        if not all(one[0] for one in everyone):
            return Placement(one_gpu=False, reason="a rank cannot use its GPU"), None
        if len({one[1] for one in everyone}) > 1:
            return Placement(one_gpu=False, reason="the ranks use several GPUs"), None
        problem = ""
        if flight is None:
            try:
                flight = Flight.open(*everyone[EXECUTOR][2:])
            except OSError as error:
                problem = str(error)
        if b"\0" in _tell_all(running, host, bytes([not problem])):
            return Placement(one_gpu=False, reason=problem or "a rank cannot open the memory of another"), None
        assert flight is not None
        assert known is not None
        executor, flight = Executor(known, device, host, flight), None
        return Placement(one_gpu=True), executor
    finally:
        if flight is not None:
            flight.close()


def _tell_all(running: RunningCollective, host: Engine, word: bytes) -> list[bytes]:
    words = np.zeros(host.size * len(word), np.uint8)
    host.all_gather(running, np.frombuffer(word, np.uint8), words, [len(word)] * host.size)
    return [words[at : at + len(word)].tobytes() for at in range(0, words.size, len(word))]
