"""A rank of `tests.soak.saves`: loads, saves, and dies in its second save, or sees another die."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

import phalanx as px
from phalanx.checkpoint.index import INDEX, read_index

__all__ = ["Plan", "run_rank", "step_of"]

CODE = str(Path(px.checkpoint.__file__).parent)
SMALL = 20
"""Short tensors that all ranks have, which are dealt out."""


class Plan(NamedTuple):
    """What a seed stands for."""

    seed: int
    victim: int
    all_die: bool
    line: float
    """Of the lines of code that the victim runs in a save, which one: 0 is the first, and 1 behind the last."""
    turn: float
    """Which time it runs that line."""
    delay: float
    """Seconds between that line and the kill."""
    beside: bool
    """Whether the save is a `save_async`."""

    @classmethod
    def draw(cls, seed: int, ranks: int) -> Plan:
        chance = random.Random(seed)
        return cls(
            seed,
            victim=0 if chance.random() < 0.4 else chance.randrange(ranks),  # the first one makes the index
            all_die=chance.random() < 0.3,
            line=chance.random(),
            turn=chance.random(),
            delay=chance.uniform(0, 0.01) if chance.random() < 0.5 else 0.0,
            beside=chance.random() < 0.3,
        )


def tree_of(step: int, rank: int, ranks: int) -> dict[str, Any]:
    """A tree in which every value says of which step it is."""
    rows = np.full((50, 1000), step * 100 + rank)
    whole = (50 * ranks, 1000)
    return {
        "step": step,
        "large": np.full((1 << 10, 1 << 10), step),
        "small": [np.full(100 + number, step) for number in range(SMALL)],
        "parts": px.checkpoint.Shard(rows, whole, (50 * rank, 0)),
        "own": px.checkpoint.PerRank({"seed": step * 100 + rank, "numbers": np.full(10, step)}),
    }


def step_of(found: dict[str, Any], rank: int, ranks: int, *, all_parts: bool) -> int:
    """The step of a tree that was loaded. All of it is of that step."""
    step: int = found["step"]
    rows = np.repeat([step * 100 + each for each in range(ranks)], 50)[:, None]
    parts = found["parts"] if all_parts else found["parts"].array
    assert (found["large"] == step).all(), "a mixture: large"
    assert (parts == (rows if all_parts else step * 100 + rank)).all(), "a mixture: parts"
    for number, small in enumerate(found["small"]):
        assert small.shape == (100 + number,)
        assert (small == step).all(), f"a mixture: small.{number}"
    if not all_parts:  # nobody else can have what ranks had for themselves
        assert found["own"]["seed"] == step * 100 + rank, "a mixture: own"
        assert (found["own"]["numbers"] == step).all(), "a mixture: own.numbers"
    return step


@contextlib.contextmanager
def traced(see: Callable[[FrameType], None]) -> Iterator[None]:
    """Calls `see` with a frame for each line of the code of checkpoints, in all threads."""

    def lines(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            see(frame)
        return lines

    def calls(frame: FrameType, _event: str, _: Any) -> Any:
        return lines if frame.f_code.co_filename.startswith(CODE) else None

    threading.settrace(calls)
    sys.settrace(calls)
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]  # it takes None, as that of sys does


def save(folder: str, world: px.Group, step: int, *, beside: bool) -> None:
    tree = tree_of(step, world.rank, world.world_size)
    if beside:
        px.checkpoint.save_async(folder, tree, world).wait()
    else:
        px.checkpoint.save(folder, tree, world)


def run_rank(world: px.Group, folder: str, first: int, plan: Plan) -> str:
    """Returns which rank it heard of as lost, or "saved" if its save was done before that."""
    pids = world.all_gather_object(os.getpid())
    if first:
        like = tree_of(0, world.rank, world.world_size)
        found = px.checkpoint.load(folder, world, like=like)
        assert step_of(found, world.rank, world.world_size, all_parts=False) == first - 1
    seen: dict[tuple[str, int], int] = {}

    def count(frame: FrameType) -> None:
        place = (frame.f_code.co_filename, frame.f_lineno)
        seen[place] = seen.get(place, 0) + 1

    with traced(count):
        save(folder, world, first, beside=plan.beside)
    if world.rank == 0:
        left = {path.name for path in Path(folder).iterdir()}
        assert left == {INDEX, *read_index(Path(folder)).files}, f"left over: {left}"
    world.barrier()
    try:
        if world.rank == plan.victim:
            place, turns = list(seen.items())[int(plan.line * len(seen))]
            trap = _Trap(place, int(plan.turn * turns), f"{folder}.place", plan, pids)
            with traced(trap):
                save(folder, world, first + 1, beside=plan.beside)
            trap.spring()
        else:
            save(folder, world, first + 1, beside=plan.beside)
    except px.PeerLost as error:
        return f"lost rank {error.peer}"
    return "saved"


class _Trap:
    """Kills when a line is run for the n-th time, after it has written down where that was.

    A line that only the first save of a world runs is not met again: then `spring`, after the save.
    """

    def __init__(self, place: tuple[str, int], turn: int, note: str, plan: Plan, pids: list[int]) -> None:
        self._place = place
        self._left = turn
        self._note = Path(note)
        self._plan = plan
        self._pids = pids

    def __call__(self, frame: FrameType) -> None:
        if frame.f_lineno != self._place[1] or frame.f_code.co_filename != self._place[0]:
            return
        self._left -= 1
        if self._left == -1:
            self._note.write_text(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}")
            if self._plan.delay:
                threading.Timer(self._plan.delay, self._kill).start()
            else:
                self._kill()

    def spring(self) -> None:
        """The save is over, and so is this process."""
        if self._left >= 0:
            self._note.write_text("after the save")
        self._kill()

    def _kill(self) -> None:
        me = os.getpid()
        for pid in self._pids if self._plan.all_die else []:
            if pid != me:
                with contextlib.suppress(ProcessLookupError):  # it has ended already
                    os.kill(pid, signal.SIGKILL)
        os.kill(me, signal.SIGKILL)
