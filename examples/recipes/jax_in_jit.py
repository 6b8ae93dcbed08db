"""A collective inside a function that JAX compiles: by a callback, in order on all ranks.

phalanx run -n 2 examples/recipes/jax_in_jit.py
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

import phalanx as px

jax.config.update("jax_platforms", "cpu")

with px.init() as world:

    def mean(gradient):
        def call(value):
            return world.all_reduce(np.array(value), op="mean")  # a copy: what JAX hands over cannot be written to

        return io_callback(call, jax.ShapeDtypeStruct(gradient.shape, gradient.dtype), gradient, ordered=True)

    @jax.jit
    def step(weights, points, values):
        gradient = jax.grad(lambda weights: ((points @ weights - values) ** 2).mean())(weights)
        return weights - 0.2 * mean(gradient)

    points = np.random.default_rng(world.rank).normal(size=(100, 3)).astype(np.float32)
    values, weights = points @ np.array([1, 2, 3], np.float32), jnp.zeros(3)
    for _step in range(60):
        weights = step(weights, points, values)
    print(f"rank {world.rank}: {np.asarray(weights).round(3)}", flush=True)
