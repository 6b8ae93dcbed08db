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
    "reduce": ("tree", "chain"),
    "reduce_scatter": ("halving_doubling", "ring"),
    "scatter": ("tree", "linear"),
}
"""Operations that have one algorithm only are not listed."""


def parse_algorithms(text: str) -> dict[str, str]:
    """The choice that a text such as `all_reduce=ring,broadcast=tree` makes.

    A name alone, such as `ring`, is for every operation that has such an algorithm and is not named itself.

    Raises:
        ValueError: The text is not valid; the message says why.
    """
    chosen: dict[str, str] = {}
    general: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        operation, equals, name = (word.strip() for word in part.partition("="))
        if not equals:
            found = [operation for operation, names in ALGORITHMS.items() if part in names]
            if not found:
                raise ValueError(f"no operation has an algorithm {part!r}")
            if any(general.setdefault(operation, part) != part for operation in found):
                raise ValueError(f"{part!r} and another name choose for the same operation")
            continue
        if operation not in ALGORITHMS:
            raise ValueError(f"{operation!r} is not an operation with a choice of algorithms ({', '.join(ALGORITHMS)})")
        if name not in ALGORITHMS[operation]:
            raise ValueError(f"{operation} has no algorithm {name!r} ({', '.join(ALGORITHMS[operation])})")
        if chosen.setdefault(operation, name) != name:
            raise ValueError(f"{operation} is named twice")
    return general | chosen
