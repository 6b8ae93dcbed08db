"""Arrays `x` and `out` of one call that share memory: what works in place, and what is refused.

What users of MPI and torch do in place works. Anything else would be read after it was overwritten, by this rank or by
another that reads it where it lies, so it is refused before anything is sent. Only contiguous memory matters here: of
an array that is not contiguous, a verb works on a copy.
"""

from __future__ import annotations

from typing import Any

from ...errors import UsageError
from .arrays import Adapted, address_of, share_memory

__all__ = ["check_gathered", "check_parts", "check_scattered", "exchanged"]

Array = Any
"""The memory of an adapted array."""


def check_gathered(verb: str, x: Array, out: Array, rank: int, before: int | None = None) -> None:
    """`all_gather` and `gather`: `x` may be exactly this rank's part of `out`.

    Args:
        before: Bytes of `out` before that part; without it, all parts are as long as `x`.

    Raises:
        UsageError: They overlap otherwise.
    """
    if share_memory(x, out) and _offset(out, x) != (rank * x.nbytes if before is None else before):
        raise _refused(verb, out, x, "x", f"x may be exactly part {rank} of out, this rank's own,")


def check_parts(verb: str, x: Array, out: Array, size: int) -> int | None:
    """`reduce_scatter` and `scatter`: `out` may be exactly one of the parts of `x`.

    Returns:
        Which one; None if they lie apart.

    Raises:
        UsageError: They overlap otherwise.
    """
    if not share_memory(x, out):
        return None
    part, rest = divmod(_offset(x, out), int(out.nbytes))
    if rest or not 0 <= part < size:
        raise _refused(verb, x, out, "out", "out may be exactly one of the parts of x")
    return part


def check_scattered(verb: str, x: Array, out: Array, rank: int, before: int) -> None:
    """`scatter` of unequal parts: `out` may be exactly this rank's part of `x`, which begins `before` bytes in it.

    Raises:
        UsageError: They overlap otherwise.
    """
    if share_memory(x, out) and _offset(x, out) != before:
        raise _refused(verb, x, out, "out", f"out may be exactly part {rank} of x, this rank's own,")


def exchanged(verb: str, source: Adapted, out: Array) -> Adapted:
    """`all_to_all` and `sendrecv`: `x` and `out` may be the same memory.

    Returns:
        The array to send: a copy if they are the same memory.

    Raises:
        UsageError: They overlap otherwise.
    """
    x = source.array
    if not share_memory(x, out):
        return source
    if _offset(x, out) or x.nbytes != out.nbytes:
        raise _refused(verb, x, out, "out", "out may be exactly x")
    return Adapted(x.copy(), source.dtype, source.library, source.finish, source.empty)


def _offset(outer: Array, inner: Array) -> int:
    """Bytes from where one array begins to where another does."""
    return address_of(inner) - address_of(outer)


def _refused(verb: str, outer: Array, inner: Array, name: str, valid: str) -> UsageError:
    at, other = _offset(outer, inner), "x" if name == "out" else "out"
    where = f"{abs(at)} bytes {'before' if at < 0 else 'after'} the beginning of {other}"
    return UsageError(
        f"{verb}: x and out overlap ({name} has {inner.nbytes} bytes and begins {where}); {valid} or lie apart from it "
        "(pass a copy)"
    )
