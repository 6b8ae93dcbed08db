"""The algorithms that collectives over the network can use, by operation: what the option `algorithm` may name."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["ALGORITHMS", "parse_algorithms"]

ALGORITHMS: Mapping[str, tuple[str, ...]] = {
    "all_gather": ("linear", "bruck", "halving_doubling", "ring"),
    "all_reduce": ("doubling", "halving_doubling", "ring"),
    "all_to_all": ("linear", "bruck", "pairwise"),
    "barrier": ("bruck", "tree"),
    "broadcast": ("tree", "chain"),
    "reduce_scatter": ("halving_doubling", "ring"),
}
"""Operations that have one algorithm only are not listed."""


def parse_algorithms(text: str) -> dict[str, str]:
    """What a text such as `all_reduce=ring,broadcast=tree` chooses.

    Raises:
        ValueError: It is no such text; says what is wrong.
    """
    chosen: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        operation, equals, name = (word.strip() for word in part.partition("="))
        if not equals:
            raise ValueError(f"{part!r} has no '=' in it")
        if operation not in ALGORITHMS:
            raise ValueError(f"{operation!r} is not an operation with a choice ({', '.join(ALGORITHMS)})")
        if name not in ALGORITHMS[operation]:
            raise ValueError(f"{operation} has no algorithm {name!r} ({', '.join(ALGORITHMS[operation])})")
        if chosen.setdefault(operation, name) != name:
            raise ValueError(f"{operation} is named twice")
    return chosen
