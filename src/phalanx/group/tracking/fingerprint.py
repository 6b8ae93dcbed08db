"""64 bits that say which operation this is, so that ranks in different ones find out at the first exchange.

The fast paths of the core compute the same number from the same parts (cpp/phalanx/fingerprint.hpp).
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

__all__ = ["extent_of", "fingerprint_of", "kind_of"]

_MASK = (1 << 64) - 1


@lru_cache(4096)
def kind_of(operation: str, dtype: str, reduction: str) -> int:
    """The part of a fingerprint that does not change from call to call."""
    text = f"{operation}|{dtype}|{reduction}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def fingerprint_of(operation: str, sequence: int, dtype: str, shape: tuple[int, ...], reduction: str, root: int) -> int:
    """The operation's number; never 0, which stands for none."""
    fingerprint = kind_of(operation, dtype, reduction)
    for part in (sequence, extent_of(shape), root):
        fingerprint = _mix(fingerprint ^ _mix(part + 1 & _MASK))
    return fingerprint or 1


@lru_cache(4096)
def extent_of(shape: tuple[int, ...]) -> int:
    """A shape as a number: arrays of (2, 3) and of (3, 2) are not alike."""
    extent = len(shape)
    for length in shape:
        extent = _mix(extent ^ _mix(length + 1))
    return extent


def _mix(x: int) -> int:
    """Spreads every bit over all (the finalizer of splitmix64)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
