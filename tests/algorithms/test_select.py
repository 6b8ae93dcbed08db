"""Which algorithm is used: every operation, size and length has one, and each can be forced."""

from __future__ import annotations

import itertools
import re

import pytest

from phalanx.algorithms import Schedule, select
from phalanx.config.algorithms import ALGORITHMS, parse_algorithms
from phalanx.errors import UsageError

from .simulate import SIZES

LENGTHS = [0, 1, 8, *(1 << i for i in range(10, 37, 2)), 100_000, 10**12]
ROOTED = ("broadcast", "gather", "reduce", "scatter")


@pytest.mark.parametrize("operation", select.OPERATIONS)
def test_every_cell_has_an_algorithm(operation: str) -> None:
    valid = ALGORITHMS.get(operation)
    for size, nbytes in itertools.product(SIZES, LENGTHS):
        name = select.choose(operation, size, nbytes)
        if valid is not None:
            assert name in valid
        for rank in sorted({0, size // 2, size - 1}):
            found = select.schedule(operation, name, rank, size, root=size - 1, nbytes=nbytes)
            assert isinstance(found, Schedule)
            assert (found.steps == ()) == (size == 1)


@pytest.mark.parametrize("operation", select.OPERATIONS)
def test_a_star_leaves_no_choice(operation: str) -> None:
    assert select.choose(operation, 5, 100, topology="star", overrides={operation: "ring"}) == "star"
    assert select.schedule(operation, "star", 1, 5).steps


@pytest.mark.parametrize("operation", ALGORITHMS)
def test_each_algorithm_can_be_forced_and_is_used_by_some_rule(operation: str) -> None:
    for name in ALGORITHMS[operation]:
        chosen = select.choose(operation, 3, 1 << 30, overrides=parse_algorithms(f"{operation}={name}"))
        assert chosen == name
        assert select.schedule(operation, name, 1, 3, nbytes=1 << 30).steps


def test_long_messages_never_travel_whole_through_several_ranks() -> None:
    for size in range(3, 65):
        for operation, bad in (
            ("all_reduce", "doubling"),
            ("all_to_all", "bruck"),
            ("broadcast", "tree"),
            ("reduce", "tree"),
        ):
            assert select.choose(operation, size, 1 << 30) != bad


@pytest.mark.parametrize("nbytes", [0, 1, 1 << 20, 1 << 40])
def test_a_chain_has_a_bounded_number_of_pieces(nbytes: int) -> None:
    pieces = select.chain_pieces(nbytes)
    assert 1 <= pieces <= select.MOST_PIECES
    assert select.schedule("broadcast", "chain", 0, 3, nbytes=nbytes).parts == pieces


def test_what_is_not_there() -> None:
    with pytest.raises(UsageError, match=r"no algorithm for 'all_redice' \(there is for all_gather, all_reduce"):
        select.choose("all_redice", 2, 8)
    with pytest.raises(UsageError, match="all_reduce has no algorithm 'tree'"):
        select.schedule("all_reduce", "tree", 0, 2)


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("", {}),
        ("all_reduce=ring", {"all_reduce": "ring"}),
        ("ring", {"all_gather": "ring", "all_reduce": "ring", "reduce_scatter": "ring"}),
        ("all_gather=bruck,ring", {"all_gather": "bruck", "all_reduce": "ring", "reduce_scatter": "ring"}),
        (" all_reduce = ring , broadcast=tree, ", {"all_reduce": "ring", "broadcast": "tree"}),
    ],
)
def test_the_option(text: str, chosen: dict[str, str]) -> None:
    assert parse_algorithms(text) == chosen


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("rings", "no operation has an algorithm 'rings'"),
        ("ring,doubling", "'doubling' and another name choose for the same operation"),
        ("send=ring", "'send' is not an operation with a choice of algorithms (all_gather, all_reduce"),
        ("all_reduce=star", "all_reduce has no algorithm 'star' (doubling, halving_doubling, ring)"),
        ("barrier=tree,barrier=bruck", "barrier is named twice"),
    ],
)
def test_an_option_that_is_wrong(text: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=re.escape(wrong)):
        parse_algorithms(text)
