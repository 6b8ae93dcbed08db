"""Which samples belong to a step, and to whom: the same for every number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arguments import as_index
from ..errors import UsageError

__all__ = ["Sampler"]


class Sampler:
    """Cuts the samples of a data set into steps. Its position is part of the state.

    Each step has `batch_size` samples, which the ranks of that step share: as many as can be get the same number. When
    a step is done again with fewer ranks, they share the same samples. So in every epoch each sample is seen once,
    whoever came and went. An epoch that ends in the middle of a step is followed by the next one.

    Args:
        length: The number of samples.
        batch_size: Samples of a step, on all ranks together.
        shuffle: Whether each epoch has an order of its own.
        seed: Of these orders. The same on all ranks.

    Raises:
        UsageError: A number is below 1.
    """

    def __init__(self, length: int, batch_size: int, *, shuffle: bool = True, seed: int = 0) -> None:
        self.length = as_index(length, "length")
        self.batch_size = as_index(batch_size, "batch_size")
        for name, value in (("length", self.length), ("batch_size", self.batch_size)):
            if value < 1:
                raise UsageError(f"{name}={value} is not valid (expected at least 1)")
        self.shuffle = shuffle
        self.seed = as_index(seed, "seed")
        if self.seed < 0:
            raise UsageError(f"seed={self.seed} is not valid (expected at least 0)")
        self.position = 0
        """Samples of all steps that were committed."""
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the next sample, from 0."""
        return self.position // self.length

    def batch(self) -> npt.NDArray[np.int64]:
        """The samples of the next step, of all ranks together, in the order in which the ranks share them."""
        found, at, wanted = [], self.position, self.batch_size
        while wanted:
            epoch, begin = divmod(at, self.length)
            part = self._epoch(epoch)[begin : begin + wanted]
            found.append(part)
            at += len(part)
            wanted -= len(part)
        return np.concatenate(found)

    def take(self, rank: int, world_size: int) -> npt.NDArray[np.int64]:
        """The samples of the next step that belong to one of its ranks."""
        return np.array_split(self.batch(), world_size)[rank]

    def advance(self) -> None:
        """Goes on to the next step. `steps` does, once a step is committed."""
        self.position += self.batch_size

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it is a position in."""
        return {"position": self.position, **self._kind()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a position.

        Raises:
            UsageError: It is one in other steps, whose samples are others.
        """
        for name, mine in self._kind().items():
            if state.get(name, mine) != mine:
                raise UsageError(
                    f"this sampler has {name}={mine}, the one whose state is loaded had {name}={state[name]}: its "
                    'samples are others (to take over the position alone, load {"position": ...})'
                )
        self.position = int(state["position"])

    def _kind(self) -> dict[str, Any]:
        return {"length": self.length, "batch_size": self.batch_size, "shuffle": self.shuffle, "seed": self.seed}

    def _epoch(self, number: int) -> npt.NDArray[np.int64]:
        if self._order is None or self._order[0] != number:
            order = np.arange(self.length, dtype=np.int64)
            if self.shuffle:
                np.random.default_rng([self.seed, number]).shuffle(order)
            self._order = (number, order)
        return self._order[1]
