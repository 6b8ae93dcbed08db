"""Data-parallel training in plain NumPy: every rank learns from its own share, gradients are averaged at each step.

phalanx run -n 4 examples/train_numpy.py
python examples/train_numpy.py              (a world of one)
"""

import hashlib
import time

import numpy as np

import phalanx as px
from phalanx.cli.demo.digits import load

HIDDEN, BATCH, STEPS, RATE, MOMENTUM = 128, 32, 400, 0.2, 0.9


def unpack(flat):
    """The layers as views of one flat array: a single all_reduce then carries the whole gradient."""
    first, second = 64 * HIDDEN, 64 * HIDDEN + HIDDEN
    third = second + HIDDEN * 10
    return flat[:first].reshape(64, HIDDEN), flat[first:second], flat[second:third].reshape(HIDDEN, 10), flat[third:]


def scores(flat, images):
    w1, b1, w2, b2 = unpack(flat)
    hidden = np.maximum(images @ w1 + b1, 0)
    return hidden, hidden @ w2 + b2


def gradient(flat, images, labels):
    """Of the mean cross-entropy of a batch."""
    _, _, w2, _ = unpack(flat)
    hidden, out = scores(flat, images)
    error = np.exp(out - out.max(axis=1, keepdims=True))
    error /= error.sum(axis=1, keepdims=True)
    error[np.arange(len(labels)), labels] -= 1
    error /= len(labels)
    back = (error @ w2.T) * (hidden > 0)
    return np.concatenate([(images.T @ back).ravel(), back.sum(0), (hidden.T @ error).ravel(), error.sum(0)])


with px.init() as world:
    data = load()
    images, labels = (part[world.rank :: world.world_size] for part in (data.images, data.labels))  # my share
    random = np.random.default_rng(world.rank)

    parameters = (random.normal(size=64 * HIDDEN + HIDDEN + HIDDEN * 10 + 10) * 0.1).astype(np.float32)
    world.broadcast(parameters, src=0)  # all start from rank 0's parameters
    velocity = np.zeros_like(parameters)

    started, communicating = time.perf_counter(), 0.0
    for step in range(STEPS):
        batch = random.integers(0, len(labels), BATCH)
        grad = gradient(parameters, images[batch], labels[batch])

        before = time.perf_counter()
        world.all_reduce(grad, op="mean")  # in place: now the mean over all ranks, the same bits everywhere
        communicating += time.perf_counter() - before

        velocity = MOMENTUM * velocity - RATE * (1 - step / STEPS) * grad
        parameters += velocity.astype(np.float32)
    seconds = time.perf_counter() - started

    fingerprint = hashlib.sha256(parameters.tobytes()).hexdigest()
    if world.rank > 0:
        world.send_object(fingerprint, dst=0)
    else:
        replicas = {fingerprint, *(world.recv_object(src=rank) for rank in range(1, world.world_size))}
        right = (scores(parameters, data.test_images)[1].argmax(axis=1) == data.test_labels).mean()
        print(f"{world.world_size} ranks, {STEPS} steps: {right:.1%} of the test images are right", flush=True)
        print(
            f"{BATCH * world.world_size * STEPS / seconds:,.0f} images/s, {communicating / seconds:.0%} communicating",
            flush=True,
        )
        print("replicas identical:", "yes" if len(replicas) == 1 else f"NO: {replicas}", flush=True)
