"""The call of a collective, as its verb describes it before it runs."""

from __future__ import annotations

from typing import NamedTuple

from .fingerprint import fingerprint_of

__all__ = ["CollectiveCall", "name_of_call"]

_ROOTS = {"broadcast": "src", "broadcast_object": "src", "scatter": "src", "scatter_object": "src", "recv": "src"}
"""The argument in which a verb names one rank; `dst` for all others."""


class CollectiveCall(NamedTuple):
    """One call of a collective. All but `detail` must be the same on all ranks."""

    operation: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    reduction: str = ""
    root: int | None = None
    detail: str = ""
    """Shown in errors only."""

    @property
    def name(self) -> str:
        """The call as errors show it."""
        return name_of_call(self.operation, self.root, self.reduction, detail=self.detail)

    def fingerprint(self, sequence: int) -> int:
        """The number by which ranks compare their collectives of that sequence number."""
        return fingerprint_of(self.operation, sequence, self.dtype, self.shape, self.reduction, self.root or 0)


def name_of_call(operation: str, root: int | None, reduction: str, *, tag: int = 0, detail: str = "") -> str:
    """An operation with its arguments, such as `reduce(dst=1, op=sum)`."""
    words = [detail] if detail else []
    if root is not None:
        words.append(f"{_ROOTS.get(operation, 'dst')}={root}")
    if reduction:
        words.append(f"op={reduction}")
    if tag:
        words.append(f"tag={tag}")
    return f"{operation}({', '.join(words)})" if words else operation
