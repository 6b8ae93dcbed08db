"""Copies between the memory of a GPU and that of the host, or inside the GPU, on a stream of Phalanx's own."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from ..deadline import Deadline
from ..errors import Timeout
from .arrays import DeviceArray
from .driver import CudaDriver, driver
from .waiting import wait_for_stream

__all__ = ["HostCopies", "host_address", "host_copies", "read", "write"]

LONGEST = 1800.0
"""Seconds after which a copy for which no deadline was given has failed."""


class HostCopies:
    """The copies of one GPU. Any thread may use it: the stream keeps them apart."""

    def __init__(self, known: CudaDriver, device: int) -> None:
        self.driver = known
        self.device = device
        with known.using(device):
            self.stream = known.new_stream()

    def load(self, array: DeviceArray, host: int, deadline: Deadline) -> bool:
        """Copies an array to an address of the host once it is computed; False if the deadline passed before."""
        if not array.ready.wait(deadline):
            return False
        if not array.nbytes:
            return True
        with self.driver.using(self.device):
            self.driver.copy_to_host(host, array.address, array.nbytes, self.stream)
            return wait_for_stream(self.driver, self.stream, deadline)

    def store(self, host: int, array: DeviceArray, deadline: Deadline) -> bool:
        """The reverse."""
        if not array.ready.wait(deadline):
            return False
        if not array.nbytes:
            return True
        with self.driver.using(self.device):
            self.driver.copy_to_device(array.address, host, array.nbytes, self.stream)
            return wait_for_stream(self.driver, self.stream, deadline)

    def copy(self, array: DeviceArray, to: DeviceArray, deadline: Deadline) -> bool:
        """Copies an array to another on the GPU; False if the deadline passed before."""
        if not array.ready.wait(deadline) or not to.ready.wait(deadline):
            return False
        if not array.nbytes or array.address == to.address:
            return True
        with self.driver.using(self.device):
            self.driver.copy(to.address, array.address, array.nbytes, self.stream)
            return wait_for_stream(self.driver, self.stream, deadline)


def host_address(host: npt.NDArray[Any]) -> int:
    """Where a contiguous array of the host begins."""
    return int(host.__array_interface__["data"][0])


@functools.cache
def _made(known: CudaDriver, device: int) -> HostCopies:
    return HostCopies(known, device)


def host_copies(device: int) -> HostCopies:
    """The copies of a GPU in this process.

    Raises:
        BackendUnavailable: There is no driver.
    """
    return _made(driver(), device)


def read(array: DeviceArray) -> npt.NDArray[Any]:
    """A copy of an array on the host.

    Raises:
        Timeout: It was not computed in half an hour.
    """
    host = np.empty(array.shape, array.dtype)
    if not host_copies(array.device).load(array, host_address(host), Deadline(LONGEST)):
        raise Timeout(f"an array on a GPU was not computed within {LONGEST:g} s", seconds=LONGEST)
    return host


def write(array: DeviceArray, values: npt.NDArray[Any]) -> None:
    """Copies values of the host to an array.

    Raises:
        Timeout: As `read`.
    """
    host = np.ascontiguousarray(values)
    if not host_copies(array.device).store(host_address(host), array, Deadline(LONGEST)):
        raise Timeout(f"an array on a GPU was not computed within {LONGEST:g} s", seconds=LONGEST)
