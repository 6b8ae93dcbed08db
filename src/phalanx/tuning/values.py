"""The settings, their defaults, and their bounds, which hold for a file, another rank and a measurement alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields

__all__ = ["BOUNDS", "DEFAULTS", "MOST_HELPERS", "NEVER", "RARELY", "Tuning"]

RARELY = 1 << 30
"""Bytes that hardly any array has. The long parts of a scatter to several ranks are read by address all the same."""
NEVER = 1 << 40
"""A size that no array reaches."""

MOST_HELPERS = 7
"""Threads that copy beside the one of a rank that waits for the bytes, where the ranks of a host leave cores free."""

BOUNDS: Mapping[str, tuple[int, int]] = {
    "reduced_by_all": (1 << 10, 1 << 20),
    "spins": (100, 50_000),
    "copy_once_from": (4 << 10, NEVER),
    "ahead_from": (64 << 10, NEVER),
    "past_from": (64 << 10, NEVER),
}
"""The smallest and the largest value of each setting."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The settings of a segment. All of its ranks use the same ones: those of the rank that makes it.

    Raises:
        ValueError: A value is out of bounds.
    """

    reduced_by_all: int = 16 << 10
    """Bytes up to which every rank reduces everything in an all_reduce, which takes half the steps."""
    spins: int = 2000
    """Looks at the other ranks before a rank yields its core and then sleeps, if there is a core for each rank."""
    copy_once_from: int = 48 << 10
    """Bytes from one rank to another from which they are read where they lie, not copied through the segment."""
    ahead_from: int = NEVER
    """Bytes that all ranks together read and write in an operation from which copies ask ahead for what comes next."""
    past_from: int = NEVER
    """Bytes of an array from which a copy that only its rank reads bypasses the caches."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            low, high = BOUNDS[name]
            if type(value) is not int or not low <= value <= high:
                raise ValueError(f"{name} is {value!r} (expected a whole number from {low} to {high})")

    def reduced_by_all_of(self, ranks: int, cores: int) -> int:
        """The same for so many ranks: where they share cores, work that each of them does takes so much longer."""
        if ranks <= cores:
            return self.reduced_by_all
        return max(self.reduced_by_all * cores // ranks, min(self.reduced_by_all, DEFAULTS.reduced_by_all))

    @classmethod
    def in_order(cls, values: Iterable[int]) -> Tuning:
        """The settings from their values alone, in the order in which they stand here.

        Raises:
            ValueError: There are too few or too many, or one is out of bounds.
        """
        return cls(**dict(zip((field.name for field in fields(cls)), values, strict=True)))

    @classmethod
    def of(cls, values: object) -> Tuning:
        """The settings from plain data; what is not named has its default.

        Raises:
            ValueError: It is no mapping, has other names, or values that are out of bounds.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"{values!r} is not a mapping of settings")
        known = {field.name for field in fields(cls)}
        unknown = sorted(str(name) for name in values if name not in known)
        if unknown:
            raise ValueError(f"{unknown[0]} is no setting (there are {', '.join(sorted(known))})")
        return cls(**values)


DEFAULTS = Tuning()
"""The settings where nothing was measured."""
