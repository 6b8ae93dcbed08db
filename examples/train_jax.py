"""Data-parallel training with JAX: every rank learns from its own share, gradients are averaged at each step.

phalanx run -n 2 examples/train_jax.py
python examples/train_jax.py              (a world of one)
"""

import jax
import jax.numpy as jnp
import numpy as np

import phalanx as px
from phalanx.cli.demo.digits import load

# Phalanx moves arrays of the processors' memory; where there is a GPU, JAX would keep them there.
jax.config.update("jax_platforms", "cpu")

HIDDEN, BATCH, STEPS, RATE = 128, 32, 400, 0.5


def scores(params, images):
    (w1, b1), (w2, b2) = params["hidden"], params["out"]
    return jnp.maximum(images @ w1 + b1, 0) @ w2 + b2


@jax.jit
def loss_and_gradients(params, images, labels):
    def loss(params):
        likely = jax.nn.log_softmax(scores(params, images))
        return -jnp.take_along_axis(likely, labels[:, None], axis=1).mean()

    return jax.value_and_grad(loss)(params)


@jax.jit
def stepped(params, gradients, rate):
    return jax.tree.map(lambda param, gradient: param - rate * gradient, params, gradients)


with px.init() as world:
    parallel = px.parallel.DataParallel(world)
    data = load()
    images, labels = parallel.shard(data.images), parallel.shard(data.labels)  # my share
    random = np.random.default_rng(world.rank)

    def layer(inputs, outputs):
        return jnp.asarray(random.normal(size=(inputs, outputs)) * 0.1, jnp.float32), jnp.zeros(outputs)

    params = parallel.broadcast({"hidden": layer(64, HIDDEN), "out": layer(HIDDEN, 10)})  # all start from rank 0's
    for step in range(1, STEPS + 1):
        batch = random.integers(0, len(labels), BATCH)
        loss, gradients = loss_and_gradients(params, images[batch], labels[batch])
        gradients = px.parallel.average_gradients(gradients, world)  # new arrays: those of JAX cannot be written to
        params = stepped(params, gradients, RATE * (1 - step / STEPS))
        if world.rank == 0 and step % 100 == 0:
            print(f"step {step}: loss {loss:.4f}", flush=True)

    parallel.verify(params)  # the same bits on all ranks, or an error that names what differs
    if world.rank == 0:
        right = (scores(params, data.test_images).argmax(axis=1) == data.test_labels).mean()
        print(f"{world.world_size} ranks, {STEPS} steps: {right:.1%} of the test images are right", flush=True)
        print("replicas identical: yes", flush=True)
