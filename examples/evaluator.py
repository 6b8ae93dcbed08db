"""Training goes on on rank 0 while the other ranks evaluate its checkpoints.

A call returns a future at once; results are printed when they come. Each evaluation has a deadline, which the
evaluator knows; it stops when the caller gives up. At the end a generator streams the metrics of single batches.

phalanx run -n 2 examples/evaluator.py
python examples/evaluator.py                (a world of one, which evaluates its own checkpoints)
"""

import time
from dataclasses import dataclass

import numpy as np

import phalanx as px
from phalanx.cli.demo.digits import load

STEPS, EVERY, RATE, BATCH = 1000, 200, 0.5, 32
STEP_SECONDS, BATCH_SECONDS = 0.001, 0.04  # as if the model were larger
RESERVE = 0.25  # seconds before its deadline at which an evaluation answers with what it has
DATA = load()
BATCHES = -(-len(DATA.test_labels) // BATCH)


@dataclass
class Report:
    step: int
    right: float
    batches: int


def batches():
    for start in range(0, len(DATA.test_labels), BATCH):
        time.sleep(BATCH_SECONDS)
        yield DATA.test_images[start : start + BATCH], DATA.test_labels[start : start + BATCH]


def probabilities(weights, images):
    scores = np.exp(images @ weights - (images @ weights).max(axis=1, keepdims=True))
    return scores / scores.sum(axis=1, keepdims=True)


# -- what the evaluators are called for --------------------------------------------------------------------------------


def evaluate(step: int, weights: np.ndarray) -> Report:
    """Evaluates as many batches as there is time for."""
    right, done = [], 0
    for images, labels in batches():
        if px.rpc.current_call().cancelled:
            print(f"evaluator: gave step {step} up after {done} batches", flush=True)
            break
        if px.rpc.time_left() < RESERVE:  # better an answer on a part than none
            break
        right.extend(probabilities(weights, images).argmax(axis=1) == labels)
        done += 1
    return Report(step, float(np.mean(right or 0)), done)


def evaluate_by_batch(weights: np.ndarray):
    """Yields the metrics of each batch; not far ahead of whoever reads them."""
    for images, labels in batches():
        likely = probabilities(weights, images)[np.arange(len(labels)), labels]
        yield {"loss": float(-np.log(likely).mean()), "images": len(labels)}


# -- what rank 0 does --------------------------------------------------------------------------------------------------


def train(agent, evaluators):
    random, weights, under_way = np.random.default_rng(0), np.zeros((64, 10)), []
    for step in range(1, STEPS + 1):
        time.sleep(STEP_SECONDS)
        batch = random.integers(0, len(DATA.labels), BATCH)
        error = probabilities(weights, DATA.images[batch])
        error[np.arange(BATCH), DATA.labels[batch]] -= 1
        weights -= RATE / BATCH * DATA.images[batch].T @ error
        if step % EVERY == 0:
            # A copy, because the call sends the array itself, and training changes it meanwhile.
            evaluator = evaluators[step // EVERY % len(evaluators)]
            under_way.append(agent.call_async(evaluator, "evaluate", step, weights.copy(), timeout=10))
        for future in [future for future in under_way if future.done()]:
            under_way.remove(future)
            show(future.result(), f"while step {step} was trained")
    print(f"training is done, {len(under_way)} evaluations are under way", flush=True)
    for future in under_way:
        show(future.result(), "after training")
    return weights


def show(report, when):
    part = f"{report.batches} of {BATCHES} batches"
    print(f"step {report.step}: {report.right:.1%} of the images are right in {part}, known {when}", flush=True)


with px.init() as world, px.rpc.Agent(world) as agent:
    agent.register(evaluate)
    agent.register(evaluate_by_batch)
    world.barrier()  # nobody calls before everybody has registered
    if world.rank == 0:
        evaluators = range(1, world.world_size) or [0]
        weights = train(agent, evaluators)

        # Little time: the evaluator sees it in time_left(), and answers with what it has.
        try:
            show(agent.call(evaluators[0], "evaluate", STEPS, weights, timeout=0.5), "within half a second")
        except px.Timeout as late:
            print(late, flush=True)

        # Given up: the evaluator sees it in current_call().cancelled.
        future = agent.call_async(evaluators[0], "evaluate", STEPS, weights)
        time.sleep(0.1)
        print("cancelled:", future.cancel(), flush=True)

        # Batch by batch, as long as it is of interest.
        with agent.call(evaluators[0], "evaluate_by_batch", weights) as stream:
            for number, metrics in enumerate(stream, 1):
                print(f"batch {number}: loss {metrics['loss']:.3f} on {metrics['images']} images", flush=True)
                if number == 3:
                    break  # leaving the block ends the generator over there
    world.barrier(timeout=300)  # the evaluators serve until rank 0 has come here
