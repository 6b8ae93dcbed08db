"""Training that survives the loss of ranks: kill any of them by hand, and see the others go on and a new one join.

phalanx run --elastic 2:4 examples/train_elastic.py              (NumPy; each rank prints its process)
phalanx run --elastic 2:4 examples/train_elastic.py torch
phalanx run --elastic 2:4 examples/train_elastic.py jax
python examples/train_elastic.py                                 (a world of one)

A second number makes each step as many seconds longer, to leave time for kills: `train_elastic.py numpy 0.05`.
"""

import hashlib
import os
import sys
import time

import numpy as np

import phalanx as px
from phalanx.cli.demo.digits import load

HIDDEN, BATCH, STEPS, RATE = 64, 96, 300, 0.5
LIBRARY = sys.argv[1] if len(sys.argv) > 1 else "numpy"
PAUSE = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0


class NumpyTrainer:
    """Weights as a dict of arrays, which are changed in place."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.params = {"w1": rng.normal(0, 0.1, (64, HIDDEN)), "w2": rng.normal(0, 0.1, (HIDDEN, 10))}
        self.state = px.elastic.State(params=self.params, sampler=sampler)

    def step(self, step, images, labels):
        w1, w2 = self.params["w1"], self.params["w2"]
        hidden = np.maximum(images @ w1, 0)
        likely = np.exp(hidden @ w2)
        likely /= likely.sum(axis=1, keepdims=True)
        likely[np.arange(len(labels)), labels] -= 1
        gradients = [images.T @ ((likely @ w2.T) * (hidden > 0)), hidden.T @ likely]
        step.group.all_reduce_many(gradients)  # sums: the ranks may have different numbers of samples
        w1 -= RATE / BATCH * gradients[0]
        w2 -= RATE / BATCH * gradients[1]

    def scores(self, images):
        return np.maximum(images @ self.params["w1"], 0) @ self.params["w2"]


class TorchTrainer:
    """A module and an optimizer, which the state knows by their state_dict."""

    def __init__(self):
        import torch

        self.torch = torch
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, 10))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.state = px.elastic.State(model=self.model, optimizer=self.optimizer, sampler=sampler)

    def step(self, step, images, labels):
        torch = self.torch
        self.optimizer.zero_grad()
        scores = self.model(torch.from_numpy(images).float())
        loss = torch.nn.functional.cross_entropy(scores, torch.from_numpy(labels).long(), reduction="sum")
        (loss / BATCH).backward()
        step.group.all_reduce_many([param.grad for param in self.model.parameters()])
        self.optimizer.step()

    def scores(self, images):
        with self.torch.no_grad():
            return self.model(self.torch.from_numpy(images).float()).numpy()


class JaxTrainer:
    """Arrays that cannot be changed: the state is given new ones."""

    def __init__(self):
        import jax
        import jax.numpy as jnp

        jax.config.update("jax_platforms", "cpu")
        rng = np.random.default_rng(0)
        params = {
            "w1": jnp.asarray(rng.normal(0, 0.1, (64, HIDDEN))),
            "w2": jnp.asarray(rng.normal(0, 0.1, (HIDDEN, 10))),
        }
        self.state = px.elastic.State(params=params, sampler=sampler)

        def loss(params, images, labels):
            likely = jax.nn.log_softmax(jnp.maximum(images @ params["w1"], 0) @ params["w2"])
            return -jnp.take_along_axis(likely, labels[:, None], axis=1).sum()

        self.gradients = jax.grad(loss)
        self.jnp = jnp

    def step(self, step, images, labels):
        gradients = self.gradients(self.state.params, images, labels)
        names = sorted(gradients)
        sums = dict(zip(names, step.group.all_reduce_many([gradients[name] for name in names]), strict=True))
        self.state.params = {name: self.state.params[name] - RATE / BATCH * sums[name] for name in names}

    def scores(self, images):
        return np.asarray(self.jnp.maximum(images @ self.state.params["w1"], 0) @ self.state.params["w2"])


def fingerprint(state):
    """The same on all ranks, to the last bit."""
    parts = state.model.state_dict() if LIBRARY == "torch" else state.params
    digest = hashlib.sha256()
    for name in sorted(parts):
        digest.update(np.ascontiguousarray(np.asarray(parts[name])).tobytes())
    return digest.hexdigest()[:16]


images, labels, test_images, test_labels = load()
sampler = px.elastic.Sampler(len(images), BATCH, seed=1)
trainer = {"numpy": NumpyTrainer, "torch": TorchTrainer, "jax": JaxTrainer}[LIBRARY]()

with px.init() as world:
    print(f"rank {world.members[world.rank]} is process {os.getpid()}", flush=True)
    for step in px.elastic.steps(world, trainer.state, total=STEPS):
        with step:  # takes the loss of a rank: the step comes again, with those that are left
            trainer.step(step, images[step.batch], labels[step.batch])
            time.sleep(PAUSE)
    right = (trainer.scores(test_images).argmax(axis=1) == test_labels).mean()
    print(
        f"{STEPS} steps, {sampler.position} samples, last with {step.group.world_size} ranks: "
        f"{right:.1%} of the images are right, weights {fingerprint(trainer.state)}",
        flush=True,
    )
