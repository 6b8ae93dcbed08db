"""Trains a classifier of handwritten digits on all ranks at once.

`phalanx demo` runs this. It is also the first example to read, and can be started by itself:

    phalanx run -n 4 -m phalanx.cli.demo.train

Every rank holds the whole model and learns from its own share of the images. At each step the ranks average their
gradients with one `all_reduce`, so that all of them take the same step, and the models stay identical to the last bit.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import time
from collections.abc import Callable

import numpy as np

import phalanx as px

from .digits import load
from .model import Classifier
from .report import Outcome, TrainingStep, reporter

BATCH = 128  # images per rank and step
RATE = 0.2  # of learning, at the start


def train(world: px.Group, steps: int, tell: Callable[[TrainingStep], None]) -> Outcome | None:
    """Trains for so many steps, and tells of each. Rank 0 gets the outcome."""
    data = load()
    images = data.images[world.rank :: world.world_size]  # this rank's share
    labels = data.labels[world.rank :: world.world_size]
    random = np.random.default_rng(world.rank)  # ranks draw different batches

    model = Classifier(inputs=64, hidden=128, classes=10, seed=world.rank)
    world.broadcast(model.parameters, src=0)  # all start from rank 0's parameters

    communicating = 0.0
    world.barrier()
    started, worked = time.perf_counter(), time.thread_time()
    for step in range(steps):
        batch = random.integers(0, len(labels), BATCH)
        loss, gradient = model.gradient(images[batch], labels[batch])

        before = time.thread_time()
        world.all_reduce(gradient, op="mean")  # in place: the mean of all ranks
        communicating += time.thread_time() - before

        rate = RATE * (1 + math.cos(math.pi * step / steps)) / 2  # falls to zero
        model.descend(gradient, rate)
        tell(TrainingStep(step + 1, steps, loss))
    seconds, worked = time.perf_counter() - started, time.thread_time() - worked

    fingerprint = hashlib.sha256(model.parameters.tobytes()).hexdigest()
    mine = {"hash": fingerprint, "share": communicating / worked}
    if world.rank > 0:
        world.send_object(mine, dst=0)
        return None
    facts = [mine, *(world.recv_object(src=rank) for rank in range(1, world.world_size))]
    return Outcome(
        ranks=world.world_size,
        steps=steps,
        parameters=model.parameters.size,
        images=len(data.labels),
        accuracy=model.accuracy(data.test_images, data.test_labels),
        seconds=seconds,
        images_per_second=BATCH * world.world_size * steps / seconds,
        communicating=sum(fact["share"] for fact in facts) / len(facts),
        replicas=[fact["hash"] for fact in facts],
    )


def main() -> None:
    """One rank's program."""
    parser = argparse.ArgumentParser(description="Trains a classifier of handwritten digits on all ranks at once.")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument(
        "--events", metavar="FILE", help="write progress there as JSON lines, for a program that draws it"
    )
    arguments = parser.parse_args()
    with px.init() as world, reporter(arguments.events, quiet=world.rank != 0) as report:
        outcome = train(world, arguments.steps, report.step)
        if outcome is not None:
            report.end(outcome)


if __name__ == "__main__":
    main()
