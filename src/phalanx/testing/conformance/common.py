"""Helpers of the checks."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ...errors import Desync, PhalanxError
from ...group import Group

__all__ = [
    "SHORT",
    "connected",
    "differ",
    "expect",
    "has_self",
    "is_classic",
    "is_star",
    "noise",
    "pairs",
    "sync",
    "within",
]

SHORT = 0.05
"""Seconds for a wait that is meant to end in a timeout."""
_E = TypeVar("_E", bound=BaseException)


def is_star(backend: Any) -> bool:
    """Whether ranks are connected with rank 0 only."""
    return getattr(backend, "topology", "full") == "star"


def has_self(backend: Any) -> bool:
    """Whether a rank may send to itself."""
    return bool(getattr(backend, "self_send", False))


def is_classic(backend: Any) -> bool:
    """Whether there is no directory that knows how the other ranks are."""
    control = getattr(backend, "control", None)
    return control is None or not control.statuses(backend.context).answered


def connected(backend: Any, a: int, b: int) -> bool:
    """Whether two ranks have a way to each other."""
    return (a != b or has_self(backend)) and (not is_star(backend) or a == 0 or b == 0)


def pairs(backend: Any) -> Iterator[tuple[int, int]]:
    """All (sender, receiver) that can talk, in the same order on all ranks."""
    size = backend.world_size
    return ((a, b) for a in range(size) for b in range(size) if a != b and connected(backend, a, b))


def expect(kind: type[_E], call: Callable[..., object], *args: Any, **kwargs: Any) -> _E:
    """The error that a call must raise."""
    try:
        result = call(*args, **kwargs)
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was expected, but the call returned {result!r}")


def differ(backend: Any, call: Callable[[Group, float], object]) -> None:
    """Makes a call that is not the same on all ranks, on a group of its own: it must be Desync.

    Args:
        call: Gets the group, and the seconds for its `timeout`.
    """
    classic = is_classic(backend)
    seconds = 0.5 if classic else 10.0
    with Group(backend) as group:
        group.barrier()

        def calls() -> None:
            call(group, seconds)
            group.barrier(timeout=seconds)  # a rank that only sends may be done before it can know

        error = expect(PhalanxError, calls)
        # Only one rank may have met the other's mark, where no directory tells the second.
        assert isinstance(error, Desync) or classic, error
        sync(backend)


@functools.lru_cache(maxsize=16)
def noise(size: int, *seed: int) -> bytes:
    """Bytes that are the same on both sides and different for every seed."""
    return np.random.default_rng([size, *seed]).bytes(size)


def sync(backend: Any) -> None:
    """All ranks have come here. By messages alone, so that it also works where the barrier is what is checked."""
    token = bytearray(1)
    if backend.rank == 0:
        for peer in range(1, backend.world_size):
            backend.recv(token, peer)
        for peer in range(1, backend.world_size):
            backend.send(b"s", peer)
    else:
        backend.send(b"s", 0)
        backend.recv(token, 0)
    assert (backend.rank == 0 and backend.world_size == 1) or token == b"s"


def within(seconds: float, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls, and fails if it took longer."""
    start = time.monotonic()
    result = call(*args, **kwargs)
    took = time.monotonic() - start
    assert took < seconds, f"it took {took:.2f} s, and at most {seconds:g} s were expected"
    return result


def same(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    """The same bits, dtype and shape."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
