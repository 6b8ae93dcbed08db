"""Which algorithm a collective over the network uses: by operation, bytes, ranks and topology.

All ranks know these facts, so they decide alike. The crossover points for few ranks were measured on two Neoverse-N1
cores over loopback TCP, with 2, 3 and 4 ranks and 8 B to 16 MiB of float32: the algorithms of an operation took turns
in one run, and a point is where the medians of two cross (`python -m tests.soak.crossover` prints the table). Where two
are within the noise of each other, the one with fewer messages is taken below a point, and the one with fewer bytes
above. For many ranks, which this machine cannot measure, the costs in the algorithms' own files decide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from phalanx.errors import UsageError

from . import bruck, chain, halving_doubling, linear, pairwise, ring, star, tree
from .schedule import Schedule

__all__ = ["OPERATIONS", "chain_pieces", "choose", "scans_by_parts", "schedule"]

FEW = 8
"""Ranks up to which it costs little that everybody talks to everybody, or sends a short buffer as a whole."""
SHORT_REDUCE = {True: 128 << 10, False: 16 << 10}
"""Bytes up to which an all_reduce among few, or among many, sends the whole buffer in every step."""
SHORT_EXCHANGE = 4 << 10
"""Bytes of a rank up to which an all_to_all among many sends them through others."""
MIDDLE = 1 << 20
"""Bytes up to which fewer steps count more than talking to neighbours only."""
FEW_SCANNING = 4
"""Ranks up to which a prefix reduction sends a whole buffer no more than twice."""
LONG_BROADCAST = 1 << 20
"""Bytes from which a broadcast goes along a chain, piece by piece."""
LONG_REDUCE = 4 << 20
"""The same for a reduce. Two cores cannot show it: four ranks there take as long with either, up to 64 MiB."""
SHORT_SCATTER = 128 << 10
"""Bytes up to which a scatter goes along the tree: then messages cost more than bytes."""
CHAIN_PIECE = 512 << 10
MOST_PIECES = 64


def choose(
    operation: str, size: int, nbytes: int, *, topology: str = "mesh", overrides: Mapping[str, str] | None = None
) -> str:
    """The name of the algorithm.

    Args:
        size: How many ranks take part.
        nbytes: Of the whole buffer of a rank: what is reduced or broadcast, what an all_gather results in, what an
            all_to_all sends, averaged over the ranks.
        topology: `"star"` if every rank is connected with rank 0 only, which leaves no choice.
        overrides: By operation, what to use instead: the option `algorithm`.

    Raises:
        UsageError: There is no such operation.
    """
    rule = _RULES.get(operation)
    if rule is None:
        raise UsageError(f"there is no algorithm for {operation!r} (there is for {', '.join(_RULES)})")
    if topology == "star":
        return "star"
    if overrides and operation in overrides:
        return overrides[operation]
    return rule(size, nbytes)


def schedule(operation: str, name: str, rank: int, size: int, *, root: int = 0, nbytes: int = 0) -> Schedule:
    """The schedule of an algorithm by its name.

    Raises:
        UsageError: The operation has no such algorithm.
        InvalidRank, InvalidWorldSize: As the algorithms.
    """
    rootless = _ROOTLESS.get((operation, name))
    if rootless is not None:
        return rootless(rank, size)
    rooted = _ROOTED.get((operation, name))
    if rooted is not None:
        return rooted(rank, size, root)
    chained = _CHAINED.get((operation, name))
    if chained is not None:
        return chained(rank, size, root, chain_pieces(nbytes))
    raise UsageError(f"{operation} has no algorithm {name!r}")


def chain_pieces(nbytes: int) -> int:
    """Into how many pieces a chain cuts a buffer."""
    return max(1, min(nbytes // CHAIN_PIECE, MOST_PIECES))


def scans_by_parts(size: int, nbytes: int) -> bool:
    """Whether a prefix reduction exchanges parts of its buffers, instead of sending them whole as `scan` does."""
    return size > FEW_SCANNING and nbytes > MIDDLE


# -- the rules ---------------------------------------------------------------------------------------------------------


def _all_reduce(size: int, nbytes: int) -> str:
    return "doubling" if nbytes <= SHORT_REDUCE[size <= FEW] else _reduce_scatter(size, nbytes)


def _reduce_scatter(size: int, nbytes: int) -> str:
    # Unless the number of ranks is a power of two, some would send everything twice.
    return "halving_doubling" if nbytes <= MIDDLE and size & (size - 1) == 0 else "ring"


def _reduce(size: int, nbytes: int) -> str:
    return "chain" if size > 2 and nbytes >= LONG_REDUCE else "tree"


def _all_gather(size: int, nbytes: int) -> str:
    return "bruck" if size <= FEW or nbytes <= MIDDLE else "ring"


def _all_to_all(size: int, nbytes: int) -> str:
    if size <= FEW:
        return "linear"
    return "bruck" if nbytes <= SHORT_EXCHANGE else "pairwise"


def _broadcast(size: int, nbytes: int) -> str:
    return "chain" if size > 2 and nbytes >= LONG_BROADCAST else "tree"


_RULES: dict[str, Callable[[int, int], str]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "barrier": lambda size, nbytes: "bruck",
    "broadcast": _broadcast,
    "gather": lambda size, nbytes: "linear",
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "scatter": lambda size, nbytes: "tree" if nbytes <= SHORT_SCATTER else "linear",
}
OPERATIONS = tuple(_RULES)

_ROOTLESS: dict[tuple[str, str], Callable[[int, int], Schedule]] = {
    ("all_gather", "bruck"): bruck.all_gather,
    ("all_gather", "halving_doubling"): halving_doubling.all_gather,
    ("all_gather", "linear"): linear.all_gather,
    ("all_gather", "ring"): ring.all_gather,
    ("all_gather", "star"): star.all_gather,
    ("all_reduce", "doubling"): halving_doubling.short_all_reduce,
    ("all_reduce", "halving_doubling"): halving_doubling.all_reduce,
    ("all_reduce", "ring"): ring.all_reduce,
    ("all_reduce", "star"): star.all_reduce,
    ("all_to_all", "bruck"): bruck.all_to_all,
    ("all_to_all", "linear"): linear.all_to_all,
    ("all_to_all", "pairwise"): pairwise.all_to_all,
    ("all_to_all", "star"): star.all_to_all,
    ("barrier", "bruck"): bruck.barrier,
    ("barrier", "star"): star.barrier,
    ("barrier", "tree"): tree.barrier,
    ("reduce_scatter", "halving_doubling"): halving_doubling.reduce_scatter,
    ("reduce_scatter", "ring"): ring.reduce_scatter,
    ("reduce_scatter", "star"): star.reduce_scatter,
}
_ROOTED: dict[tuple[str, str], Callable[[int, int, int], Schedule]] = {
    ("broadcast", "star"): star.broadcast,
    ("broadcast", "tree"): tree.broadcast,
    ("gather", "linear"): linear.gather,
    ("gather", "star"): star.gather,
    ("reduce", "star"): star.reduce,
    ("reduce", "tree"): tree.reduce,
    ("scatter", "linear"): linear.scatter,
    ("scatter", "star"): star.scatter,
    ("scatter", "tree"): tree.scatter,
}
_CHAINED: dict[tuple[str, str], Callable[[int, int, int, int], Schedule]] = {
    ("broadcast", "chain"): chain.broadcast,
    ("reduce", "chain"): chain.reduce,
}
