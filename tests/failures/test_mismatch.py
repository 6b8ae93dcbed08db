"""Random programs in which one rank differs in one call: `Desync` (or `Timeout`) on all ranks, with the right names.

All programs run in one world, each in a group of its own, because a mismatch breaks its group for good. Some run at a
time, each on a thread: what they do for most of the time is to wait.
"""

from __future__ import annotations

import random
import re
import traceback
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from tests import lateness

import phalanx as px
from phalanx import _native
from phalanx.errors import Desync, PhalanxError, Timeout
from phalanx.testing import run_ranks

RANKS = 3
PROGRAMS = 170
"""For each of the backends below: more than 500 in all."""
SHAPES = 20
"""More of them, in which one rank's array has another shape and the same size."""
KINDS = ("operation", "size", "dtype", "root", "reduction", "order", "missing", "missing at the end", "extra")
OPERATIONS = ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "reduce_scatter", "all_to_all", "barrier")
HAVE_ROOT = ("reduce", "broadcast", "gather")
HAVE_REDUCTION = ("all_reduce", "reduce", "reduce_scatter")
DTYPES = ("float32", "float64", "int32", "int64", "float16")
SIZES = (1, 3, 100, 5000, 200_000)
PATIENCE = 20.0
SHORT = 0.3
AT_A_TIME = 4


@dataclass(frozen=True)
class Call:
    """One collective, as a program has it."""

    operation: str
    size: int
    dtype: str
    root: int
    reduction: str
    dims: int = 1

    def run(self, group: px.Group, timeout: float) -> None:
        shape = (self.size * RANKS,) if self.dims == 1 else (RANKS, self.size)
        x = np.full(shape, group.rank + 1, self.dtype)
        words: dict[str, Any] = {"timeout": timeout}
        if self.operation in HAVE_REDUCTION:
            words["op"] = self.reduction
        if self.operation == "barrier":
            group.barrier(timeout=timeout)
            return
        if self.operation in HAVE_ROOT:
            result = getattr(group, self.operation)(x, self.root, **words)
        else:
            result = getattr(group, self.operation)(x, **words)
        self.check(group.rank, result)

    def check(self, rank: int, result: Any) -> None:
        """Never wrong data: what ended well is right."""
        ones = np.arange(1, RANKS + 1)
        combined = {"sum": ones.sum(), "max": RANKS, "prod": ones.prod()}[self.reduction]
        if self.operation in ("all_reduce", "reduce_scatter") or (self.operation == "reduce" and rank == self.root):
            assert (result == combined).all()
        elif self.operation == "broadcast":
            assert (result == self.root + 1).all()
        elif self.operation in ("all_gather", "all_to_all") or (self.operation == "gather" and rank == self.root):
            assert (result.reshape(RANKS, -1) == ones[:, None]).all()


def random_call(draw: random.Random) -> Call:
    return Call(
        draw.choice(OPERATIONS),
        draw.choice(SIZES),
        draw.choice(DTYPES),
        draw.randrange(RANKS),
        draw.choice(("sum", "max", "prod")),
    )


def another(draw: random.Random, call: Call, kind: str) -> Call | None:
    """The same call with one thing changed; None if it has no such thing."""
    if kind == "operation":
        return replace(call, operation=draw.choice([name for name in OPERATIONS if name != call.operation]))
    if call.operation == "barrier":
        return None
    if kind == "size":
        return replace(call, size=draw.choice([size for size in SIZES if size != call.size]))
    if kind == "shape":
        return replace(call, dims=3 - call.dims)
    if kind == "dtype":
        return replace(call, dtype=draw.choice([dtype for dtype in DTYPES if dtype != call.dtype]))
    if kind == "root" and call.operation in HAVE_ROOT:
        return replace(call, root=(call.root + draw.randrange(1, RANKS)) % RANKS)
    if kind == "reduction" and call.operation in HAVE_REDUCTION:
        return replace(call, reduction=draw.choice([op for op in ("sum", "max", "prod") if op != call.reduction]))
    return None


def make(seed: int) -> tuple[str, int, int, list[Call], list[Call]]:
    """What kind of difference, the odd rank, at which call they part, everybody's program, the odd rank's."""
    draw = random.Random(seed)
    kind = KINDS[seed % len(KINDS)] if seed % 1000 < PROGRAMS else "shape"
    while True:
        program = [random_call(draw) for _ in range(draw.randrange(2, 6))]
        odd = list(program)
        at = draw.randrange(len(program))
        if kind == "missing at the end":
            at = len(program) - 1
            del odd[at]
        elif kind == "missing":
            del odd[at]
        elif kind == "extra":
            odd.insert(at, random_call(draw))
        elif kind == "order":
            if at == 0 or odd[at] == odd[at - 1]:
                continue
            odd[at - 1 : at + 1] = odd[at], odd[at - 1]
        else:
            changed = another(draw, odd[at], kind)
            if changed is None:
                continue
            odd[at] = changed
        if kind != "missing at the end":
            program, odd = [*program, FINALE], [*odd, FINALE]
        parted = next(i for i in range(len(program)) if i >= len(odd) or odd[i] != program[i])
        return kind, draw.randrange(RANKS), parted, program, odd


FINALE = Call("all_reduce", 7, "uint8", 0, "max")
"""No program has it before its end, so that a call too many or too few always meets a different one."""


def run_programs(world: px.Group, first: int, count: int, in_step: bool) -> list[str]:
    """Deals the programs out to threads, each with a group of all ranks to make the groups of its programs from."""
    hands = [range(first + hand, first + count, AT_A_TIME) for hand in range(AT_A_TIME)]
    parents = [world.subgroup(range(RANKS)) for _ in hands]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        found = list(pool.map(run_some, parents, hands, [in_step] * AT_A_TIME))
    for parent in parents:
        parent.close()
    return [problem for problems in found for problem in problems]


def run_some(world: px.Group, seeds: Iterable[int], in_step: bool) -> list[str]:
    problems = []
    for seed in seeds:
        kind, odd_rank, parted, program, odd = make(seed)
        mine = odd if world.rank == odd_rank else program
        group = world.subgroup(range(RANKS))
        error: BaseException | None = None
        done = 0
        began = lateness.now()
        try:
            for done, call in enumerate(mine):
                alone = kind == "missing at the end" and done == parted
                call.run(group, lateness.bound(SHORT, began) if alone else PATIENCE)
        except PhalanxError as raised:
            error = raised
        except Exception:
            problems.append(f"seed {seed} ({kind}): {traceback.format_exc()}")
        strict = in_step and not any(call.operation in HAVE_ROOT for call in (*program[parted:], *odd[parted:]))
        problem = judge(world.rank, kind, odd_rank, parted, done if strict else 0, error)
        if error is None and not strict and kind == "missing at the end":
            problem = ""  # this rank had nothing to wait for
        if problem:
            problems.append(f"seed {seed} ({kind}, rank {odd_rank} differs at {parted}): {problem}: {error!r}")
        world.barrier()
        group.close()
    return problems


def judge(rank: int, kind: str, odd_rank: int, parted: int, done: int, error: BaseException | None) -> str:
    if kind == "missing at the end":
        if rank == odd_rank:
            return "" if error is None else "it did nothing wrong yet"
        right = isinstance(error, Timeout) and list(error.missing) == [odd_rank]
        return "" if right else f"Timeout, missing {odd_rank}, was expected"
    if not isinstance(error, Desync):
        return "Desync was expected"
    if done > parted:
        return f"it was found at call {done} only"
    if f"rank {odd_rank} called" not in str(error):
        return "the rank that differs is not named"
    place = re.compile(rf"#{parted + 1}( of \w+\[[\d, ]+\])? at test_mismatch\.py:\d+ in run")
    if not place.search(error.mine) or not place.search(error.theirs) or error.mine == error.theirs:
        return "where they parted is not named"
    return ""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["segment", "tcp", "simulated"])
def test_one_rank_differs_in_one_call(how: str) -> None:
    # In a segment nobody runs ahead of a mismatch, but where data goes one way, from or to a root. Elsewhere everybody
    # may who has nothing to wait for, and hears at the next call that has.
    arguments = (
        {"segment": 0, "tcp": 10_000, "simulated": 20_000}[how],
        PROGRAMS + SHAPES,
        how == "segment" and _native.available,
    )
    if how == "simulated":
        results = run_ranks(RANKS, run_programs, *arguments, timeout=280)
    else:
        options = px.Options(transport="tcp" if how == "tcp" else "auto")
        results = run_ranks(RANKS, run_programs, *arguments, backend="mesh", options=options, timeout=280)
    problems = [f"rank {rank}: {problem}" for rank, found in enumerate(results) for problem in found]
    assert not problems, f"{len(problems)} problems\n" + "\n".join(problems[:10])
