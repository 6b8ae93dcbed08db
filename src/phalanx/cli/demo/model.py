"""A small classifier in plain NumPy. One flat array holds all parameters: one all_reduce then carries the gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Classifier"]

Floats = npt.NDArray[np.float32]


class Classifier:
    """Inputs, one hidden layer (ReLU), softmax over the classes; stochastic gradient descent with momentum.

    Args:
        inputs, hidden, classes: The sizes of the layers.
        seed: Of the random start.
    """

    def __init__(self, inputs: int, hidden: int, classes: int, *, seed: int) -> None:
        self.shapes = [(inputs, hidden), (hidden,), (hidden, classes), (classes,)]
        self.parameters = np.zeros(sum(int(np.prod(shape)) for shape in self.shapes), np.float32)
        self.velocity = np.zeros_like(self.parameters)
        self.layers = self._split(self.parameters)
        random = np.random.default_rng(seed)
        for layer in self.layers[::2]:  # the weights; the biases stay 0
            layer[...] = random.normal(0, np.sqrt(2 / layer.shape[0]), layer.shape)

    def _split(self, flat: Floats) -> list[Floats]:
        """Views of a flat array in the shapes of the layers: what is written to one is seen in the other."""
        ends = np.cumsum([int(np.prod(shape)) for shape in self.shapes])
        return [part.reshape(shape) for part, shape in zip(np.split(flat, ends[:-1]), self.shapes, strict=True)]

    def gradient(self, images: Floats, labels: npt.NDArray[Any]) -> tuple[float, Floats]:
        """The mean loss of a batch, and its gradient in the order of `parameters`."""
        weights, bias, weights_out, bias_out = self.layers
        hidden = np.maximum(images @ weights + bias, 0)
        scores = hidden @ weights_out + bias_out
        chances = np.exp(scores - scores.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        rows = np.arange(len(labels))
        loss = -float(np.log(chances[rows, labels] + 1e-9).mean())

        flat = np.empty_like(self.parameters)
        grad_weights, grad_bias, grad_weights_out, grad_bias_out = self._split(flat)
        error = chances
        error[rows, labels] -= 1
        error /= len(labels)
        np.matmul(hidden.T, error, out=grad_weights_out)
        error.sum(axis=0, out=grad_bias_out)
        error = (error @ weights_out.T) * (hidden > 0)
        np.matmul(images.T, error, out=grad_weights)
        error.sum(axis=0, out=grad_bias)
        return loss, flat

    def descend(self, gradient: Floats, rate: float, momentum: float = 0.9) -> None:
        """One step of gradient descent."""
        self.velocity *= momentum
        self.velocity -= rate * gradient
        self.parameters += self.velocity

    def accuracy(self, images: Floats, labels: npt.NDArray[Any]) -> float:
        """The share of images that are classified right."""
        weights, bias, weights_out, bias_out = self.layers
        scores = np.maximum(images @ weights + bias, 0) @ weights_out + bias_out
        return float((scores.argmax(axis=1) == labels).mean())
