"""How a training run is told: as lines for a log, as events for `phalanx demo`, and the result in words."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Protocol, TextIO

__all__ = ["DemoReport", "Outcome", "TrainingStep", "reporter"]

_EVENT_PAUSE = 0.05
"""Seconds between two events: as often as an eye can follow."""
_SHOWN_ALONE = 8
"""Up to so many ranks each have a line of their own."""


@dataclass(frozen=True)
class TrainingStep:
    """One step of training is done."""

    done: int
    steps: int
    loss: float


@dataclass(frozen=True)
class Outcome:
    """The outcome of a training run."""

    ranks: int
    steps: int
    parameters: int
    images: int
    accuracy: float
    seconds: float
    images_per_second: float
    communicating: float
    """The share of a rank's processor time that went into all_reduce; mean over the ranks."""
    replicas: list[str]
    """The SHA-256 of each rank's parameters."""

    @property
    def identical(self) -> bool:
        """True if every rank ended with the same bits."""
        return len(set(self.replicas)) == 1

    def lines(self) -> list[tuple[str, str]]:
        """The result in words, as pairs of a name and what is to be said of it."""
        verdict = "bit-identical" if self.identical else "DIFFERENT"
        speed = f"{self.images_per_second:,.0f} images/s on {_count(self.ranks, 'rank')} ({self.seconds:.1f} s)"
        return [
            ("accuracy", f"{self.accuracy:.1%} of the test images"),
            ("throughput", speed),
            ("communicating", f"{self.communicating:.0%} of the ranks' processor time"),
            ("replicas", f"{verdict}, by the SHA-256 of each rank's {self.parameters:,} parameters"),
            *(("", line) for line in _proof(self.replicas)),
        ]


def _proof(replicas: list[str]) -> list[str]:
    """Each rank with its hash; of many ranks those that agree in one line."""
    if len(replicas) <= _SHOWN_ALONE:
        return [f"rank {rank}: {digest[:32]}" for rank, digest in enumerate(replicas)]
    ranks: dict[str, list[int]] = {}
    for rank, digest in enumerate(replicas):
        ranks.setdefault(digest, []).append(rank)
    return [f"{_ranks(members)}: {digest[:32]}" for digest, members in ranks.items()]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"


class DemoReport(Protocol):
    """A listener to the progress."""

    def step(self, step: TrainingStep) -> None:
        """A step is done."""

    def end(self, outcome: Outcome) -> None:
        """The training is over."""


class _LogLines:
    """Some lines for a log: one for each tenth of the way, then the result."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def step(self, step: TrainingStep) -> None:
        if step.done == step.steps or step.done % max(1, step.steps // 10) == 0:
            self._say(f"step {step.done:>4} of {step.steps}   loss {step.loss:.4f}")

    def end(self, outcome: Outcome) -> None:
        for name, text in outcome.lines():
            self._say(f"{name + ':' if name else '':<15}{text}")

    def _say(self, line: str) -> None:
        print(line, file=self._out, flush=True)


class _Events:
    """JSON lines for a program: `{"done", "steps", "loss"}` now and then, and the outcome at the end."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._next = 0.0

    def step(self, step: TrainingStep) -> None:
        now = time.monotonic()
        if step.done == step.steps or now >= self._next:
            self._next = now + _EVENT_PAUSE
            self._write(asdict(step))

    def end(self, outcome: Outcome) -> None:
        self._write(asdict(outcome))

    def _write(self, event: dict[str, object]) -> None:
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()


class _Nobody:
    def step(self, step: TrainingStep) -> None:
        pass

    def end(self, outcome: Outcome) -> None:
        pass


@contextlib.contextmanager
def reporter(events: str | None, *, quiet: bool) -> Iterator[DemoReport]:
    """The report of this rank: none if `quiet`, else to the file `events`, else lines on standard output."""
    if quiet:
        yield _Nobody()
    elif events is None:
        yield _LogLines(sys.stdout)
    else:
        with open(events, "a", encoding="utf-8") as file:
            yield _Events(file)
