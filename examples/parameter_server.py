"""A parameter server: rank 0 holds the parameters, the others send it gradients as soon as they have them.

No rank waits for another one's gradient. So a gradient may belong to parameters that are a few updates old; one that
is too old is left out.

phalanx run -n 4 examples/parameter_server.py
python examples/parameter_server.py         (a world of one, which serves itself)
"""

import threading
from collections import deque

import numpy as np

import phalanx as px

FEATURES, BATCH, STEPS, RATE, NOISE = 20, 32, 300, 0.05, 0.1
AHEAD = 2  # gradients of one worker that may be on their way
OLDEST = 16  # updates that may come between the parameters of a gradient and its use
TRUTH = np.random.default_rng(0).normal(size=FEATURES)


def make_data(seed, rows):
    random = np.random.default_rng(seed)
    inputs = random.normal(size=(rows, FEATURES))
    return inputs, inputs @ TRUTH + NOISE * random.normal(size=rows)


class Parameters:
    """Lives on rank 0. Each worker has an instance of its own there; lock, weights and version are shared by all."""

    lock = threading.Lock()  # calls that come at the same time may run beside each other
    weights = np.zeros(FEATURES)
    version = 0

    def pull(self) -> tuple[int, np.ndarray]:
        with self.lock:
            return Parameters.version, Parameters.weights

    def push(self, version: int, gradient: np.ndarray) -> int:
        """Uses a gradient, and returns how many updates old it was."""
        with self.lock:
            age = Parameters.version - version
            if age > OLDEST:
                return age
            # A new array, and not `-=`: the old one may be on its way to a worker.
            Parameters.weights = weights = Parameters.weights - RATE * gradient
            Parameters.version = now = Parameters.version + 1
        if now % 100 == 0:
            print(f"loss after {now} updates: {loss(weights):.4f}", flush=True)
        return age


def loss(weights):
    inputs, outputs = make_data(seed=1000, rows=1000)  # which no worker has
    return np.mean((inputs @ weights - outputs) ** 2)


def work(server, seed):
    inputs, outputs = make_data(seed, rows=2000)
    random = np.random.default_rng(seed)
    pulled, pushed, ages = server.pull.call_async(), deque(), []
    for _ in range(STEPS):
        version, weights = pulled.result()
        pulled = server.pull.call_async()  # the next ones come while this rank computes
        batch = random.integers(0, len(inputs), BATCH)
        gradient = inputs[batch].T @ (inputs[batch] @ weights - outputs[batch]) / BATCH
        pushed.append(server.push.call_async(version, gradient))  # and this goes meanwhile
        if len(pushed) > AHEAD:
            ages.append(pushed.popleft().result())  # raises what went wrong with it
    return ages + [push.result() for push in pushed]


with px.init() as world, px.rpc.Agent(world) as agent:
    agent.register(Parameters)
    world.barrier()  # nobody calls before everybody has registered
    if world.rank == 0:
        print(f"loss in the beginning: {loss(Parameters.weights):.4f}", flush=True)
    if world.rank > 0 or world.world_size == 1:
        ages = np.array(work(agent.create(0, "Parameters"), seed=world.rank))
        print(
            f"rank {world.rank}: {STEPS} gradients, {ages.mean():.1f} updates old on average, "
            f"{np.count_nonzero(ages > OLDEST)} too old",
            flush=True,
        )
    world.barrier(timeout=300)  # rank 0 serves until all have come here
    if world.rank == 0:
        print(f"final loss: {loss(Parameters.weights):.4f} (the noise alone: {NOISE**2:.4f})", flush=True)
