"""One interface to the libraries of all contenders, so that all run in the same loop."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from .operations import Arrays

__all__ = ["Call", "DeviceLibrary", "Library", "LibraryLacks", "SegmentLibrary", "open_library", "pingpong", "shift"]

Call = Callable[[], object]
"""One call of an operation, with its arguments bound."""


class LibraryLacks(Exception):
    """The library has no such operation, or not for this dtype. The text says what it lacks."""


class Library(Protocol):
    """A world of one contender, as one of its ranks sees it."""

    rank: int
    size: int
    version: str

    def call(self, operation: str, arrays: Arrays) -> Call:
        """The operation on these arrays.

        Raises:
            LibraryLacks: It has none.
        """

    def barrier(self) -> object:
        """Waits for all ranks."""

    def close(self) -> None:
        """Leaves the world."""


@runtime_checkable
class SegmentLibrary(Protocol):
    """A library with memory of its own for arrays."""

    def empty(self, count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """An array in it."""


@runtime_checkable
class DeviceLibrary(Protocol):
    """A library whose calls are on copies of the arrays, in the memory of a device."""

    def to_device(self, arrays: Arrays) -> None:
        """Brings the copies up to date."""

    def to_host(self, arrays: Arrays) -> None:
        """Brings the arrays up to date."""


def open_library(name: str, timeout: float) -> Library:
    """Joins the world that this process was started for. No other library is imported.

    Args:
        name: A module with a function `open_world(timeout)`, or `module:backend` where it also takes a backend's name.
        timeout: Seconds that the library waits for other ranks, if it has such a limit.
    """
    module, _, backend = name.partition(":")
    open_world = importlib.import_module(module).open_world
    library: Library = open_world(timeout, backend) if backend else open_world(timeout)
    return library


def pingpong(rank: int, send: Callable[..., object], recv: Callable[..., object], x: object, out: object) -> Call:
    """A message from rank 0 to rank 1 and back. `send(array, rank)` and `recv(array, rank)` are the library's."""

    def serve() -> None:
        send(x, 1)
        recv(out, 1)

    def return_it() -> None:
        recv(out, 0)
        send(out, 0)

    def watch() -> None:
        """The other ranks play no part."""

    return {0: serve, 1: return_it}.get(rank, watch)


def shift(
    receive: Callable[[], Any], send: Callable[[], Any], wait: Callable[[Any], object] = lambda work: work.wait()
) -> Call:
    """A message to the next rank while that of the one before comes, by two calls that do not wait."""

    def call() -> None:
        coming, going = receive(), send()
        wait(coming)
        wait(going)

    return call
