"""The identities of worlds and groups. Traffic of two contexts never meets."""

from __future__ import annotations

import hashlib

__all__ = ["RAW_LANE", "WORLD_CONTEXT", "derive_context"]

WORLD_CONTEXT = b"phalanx-world\0\0\0"
"""The context of a whole world; those of all groups are derived from it."""
RAW_LANE = 0
"""The lane of `Backend.send` and `recv`; a group on the backend has lanes of its own."""


def derive_context(parent: bytes, *parts: str | int | tuple[int, ...] | None) -> bytes:
    """The identity of a group made from another: the same on all members, different for every group.

    Plain ints only: `repr` of NumPy's is another text.
    """
    text = repr(parts).encode()
    return hashlib.blake2b(parent + text, digest_size=16, person=b"phalanx-context").digest()
