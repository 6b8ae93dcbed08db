"""Whether long messages, and long arguments and results of remote calls, are read where they lie, in the memory of the
other rank's process.

Through a ring a payload is copied twice, by two cores at the same time. Where it lies it is copied once, by one core
and by threads that help if there are cores to spare. The second way is several times faster on a large machine, and on
one whose cores others want; on a small and quiet one the first may be. So a link tries both, and takes the way that was
faster of late. See cpp/phalanx/lending.hpp for how memory is lent, and how that is given up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..tuning import MOST_HELPERS, NEVER, current

if TYPE_CHECKING:
    from .._core import Crew

__all__ = ["LEND_ALONE_FROM", "NOTHING", "Lending", "lending_with"]

LEND_FROM = 256 << 10
"""Bytes of a payload from which a copy less may gain more than it takes to arrange: both ways are tried then."""
LEND_ALONE_FROM = 2 << 20
"""The same of a message where no cores are to spare but that of the sender, which waits: a thread helps there."""
LEND_IN_EXCHANGES_FROM = 128 << 10
"""The same of a message whose sender receives another at the same time: neither core is idle then."""
LEND_FOR = 20e-3
"""Seconds without progress after which a sender takes its memory back: on a busy machine the reader comes later."""


class Lending(NamedTuple):
    """How a link or a channel moves long payloads."""

    lend_from: int
    """Bytes of a payload from which it may be read where it lies; 0: never."""
    lend_for: float
    """Seconds without progress after which the sender takes its memory back."""
    helpers: int
    """Threads that copy beside the one that waits for the payload, at most."""
    crew: Crew | None = None
    """Whose threads they are: one for all links and channels of a world."""
    lend_in_exchanges_from: int = 0
    """As `lend_from`, of a message whose sender receives another at the same time."""


NOTHING = Lending(0, 0.0, 0)


def lending_with(spare_cores: int, crew: Crew | None) -> Lending:
    """How a rank moves long payloads, if it has so many cores to spare, and this crew to use them.

    `copy_once_from` of `PHALANX_TUNING` switches loans off, as it does for collectives.
    """
    if current(0.0).copy_once_from >= NEVER:
        return NOTHING
    return Lending(LEND_FROM, LEND_FOR, min(spare_cores, MOST_HELPERS), crew, LEND_IN_EXCHANGES_FROM)
