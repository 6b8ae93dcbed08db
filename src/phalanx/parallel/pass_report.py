"""The report of a rank at the end of a pass of the reducer."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["PassReport"]


@dataclasses.dataclass
class PassReport:
    """How a pass went on a rank. The reports of all ranks are combined by their maximum."""

    words: npt.NDArray[np.int64]
    buckets: int

    @classmethod
    def make(
        cls, *, failed: int, trained: Sequence[bool], grown: Sequence[bool], used: Sequence[bool] | None
    ) -> PassReport:
        """`failed` is 0, or 1 + the rank. `used` is left out where all parameters have to be."""
        mark = zlib.crc32(bytes(trained))  # the largest of x and of -x tell whether all are the same
        return cls(np.array([failed, mark, -mark, *grown, *(used or ())], np.int64), len(grown))

    @property
    def failed(self) -> int:
        """0 if the pass went well everywhere, else 1 + a rank on which it failed."""
        return int(self.words[0])

    @property
    def trained_alike(self) -> bool:
        """Whether all ranks train the same parameters."""
        return bool(self.words[1] == -self.words[2])

    @property
    def grown(self) -> list[bool]:
        """For each bucket, whether a gradient in it changed on some rank after the bucket was sent."""
        return [bool(word) for word in self.words[3 : 3 + self.buckets]]

    @property
    def used(self) -> list[bool]:
        """For each parameter, whether some rank has a gradient; empty if all parameters have to be used."""
        return [bool(word) for word in self.words[3 + self.buckets :]]
