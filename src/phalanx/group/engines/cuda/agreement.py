"""Finds out, in a group's first collective on arrays of a GPU, how its ranks share it: all of them take part."""

from __future__ import annotations

import contextlib
import os
import struct
from typing import TYPE_CHECKING

import numpy as np

from ...._native import core
from ....cuda.driver import HANDLE_BYTES, CudaDriver, CudaError, driver
from ....cuda.host_copies import host_address, host_copies
from ....cuda.kernels.loaded import kernels_of
from ....cuda.waiting import wait_for_stream
from ....errors import PhalanxError
from ...running_collective import RunningCollective
from ..segment import SegmentEngine
from . import routing

if TYPE_CHECKING:
    from ...._core import DeviceCollectives

__all__ = ["DeviceSharing", "agree"]

EXECUTOR = 0
"""The rank whose kernels serve all ranks; also in cpp/phalanx/cuda/collectives.hpp."""
_HELLO = struct.Struct(f"<16sQ{HANDLE_BYTES}s")
"""Which GPU a rank uses, its process, and the executor's handle of the flight's word."""
_WORD_BYTES = 64


class DeviceSharing:
    """One rank's part in the collectives on a GPU: what the core needs of the driver, given back by `close`.

    Args:
        executes: True if the executor can open the memory of all ranks.
        word: The address of the flight's word on the GPU, here; see cpp/phalanx/cuda/flight.hpp.
        process: The executor's.
    """

    def __init__(
        self, known: CudaDriver, device: int, host: SegmentEngine, *, executes: bool, word: int, process: int
    ) -> None:
        assert core is not None
        self.executes = executes
        self._driver = known
        self._device = device
        self._word = word
        self._owns_word = host.rank == EXECUTOR
        with known.using(device):
            self._stream, self._event = known.new_stream(), known.new_event()
        functions = [known.address_of(name) for name in core.cuda_functions()]
        self.collectives: DeviceCollectives = core.DeviceCollectives(
            host.segment,
            functions,
            known.context(device),
            self._stream,
            self._event,
            device,
            executes=executes,
            executors_process=0 if self._owns_word else process,
            closed=word,
            short_bytes=routing.SHORT,
            short_if_idle=routing.SHORT_IF_IDLE,
            short_if_busy=routing.SHORT_IF_BUSY,
            short_if_closed=routing.SHORT_IF_CLOSED,
            slice_seconds=routing.SLICE,
            load_kernels=lambda: kernels_of(known, device),
            error_of=lambda function, code: _error_of(known, function, code),
        )

    def close(self) -> None:
        """Gives it all back."""
        self.collectives.close()
        _release(self._driver, self._device, self._word, own=self._owns_word)
        with contextlib.suppress(CudaError), self._driver.using(self._device):
            self._driver.end_event(self._event)
            self._driver.end_stream(self._stream)


def agree(running: RunningCollective, host: SegmentEngine, device: int) -> DeviceSharing:
    """How the ranks of a segment share a GPU.

    Raises:
        DeadlinePassed, FingerprintMismatch, PhalanxError: As every engine.
    """
    known = driver()
    word, handle = _new_word(known, device, running) if host.rank == EXECUTOR else (0, b"")
    try:
        hello = _HELLO.pack(known.device_uuid(device), os.getpid(), handle)
        everyone = [_HELLO.unpack(words) for words in host.tell_all(running, hello)]
        _, process, handle = everyone[EXECUTOR]
        one_gpu = len({uuid for uuid, _, _ in everyone}) == 1 and bool(handle.strip(b"\0"))
        if one_gpu and host.rank != EXECUTOR:
            with contextlib.suppress(CudaError), known.using(device):
                word = known.open(handle)
        executes = b"\0" not in host.tell_all(running, bytes([one_gpu and bool(word)]))
        made = DeviceSharing(known, device, host, executes=executes, word=word, process=process)
    except BaseException:
        _release(known, device, word, own=host.rank == EXECUTOR)
        raise
    return made


def _new_word(known: CudaDriver, device: int, running: RunningCollective) -> tuple[int, bytes]:
    """A word on the GPU that is 0, and its handle; nothing if other processes could not open it."""
    with contextlib.suppress(CudaError), known.using(device):
        address = known.allocate(_WORD_BYTES)
        try:
            zeros = np.zeros(_WORD_BYTES, np.uint8)
            stream = host_copies(device).stream
            known.copy_to_device(address, host_address(zeros), _WORD_BYTES, stream)
            if wait_for_stream(known, stream, running.deadline):
                return address, known.export(address)
        except CudaError:
            known.free(address)
            raise
        known.free(address)
    return 0, b""


def _release(known: CudaDriver, device: int, word: int, *, own: bool) -> None:
    if word:
        with contextlib.suppress(CudaError), known.using(device):
            (known.free if own else known.close)(word)


def _error_of(known: CudaDriver, function: str, code: int) -> PhalanxError:
    if not function:
        return PhalanxError("another rank has given up a collective of this group")
    return known.error_of(function, code)
