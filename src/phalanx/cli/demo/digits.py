"""The bundled data set: 1,797 handwritten digits of 8 x 8 pixels. Origin and licence are in DIGITS.md."""

from __future__ import annotations

from importlib import resources
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Digits", "load"]


class Digits(NamedTuple):
    """Images as rows of 64 values from 0 to 1, and the digit of each; apart for training and for the test."""

    images: npt.NDArray[np.float32]
    labels: npt.NDArray[Any]
    test_images: npt.NDArray[np.float32]
    test_labels: npt.NDArray[Any]


def load(test: int = 360) -> Digits:
    """Reads the data and sets `test` images apart. The split has a fixed seed: it is the same on every rank."""
    with resources.files(__package__).joinpath("digits.npz").open("rb") as file, np.load(file) as stored:
        images = stored["images"].reshape(-1, 64).astype(np.float32) / 16
        labels = stored["labels"].astype(np.intp)
    order = np.random.default_rng(2024).permutation(len(labels))
    train, held_out = order[test:], order[:test]
    return Digits(images[train], labels[train], images[held_out], labels[held_out])
