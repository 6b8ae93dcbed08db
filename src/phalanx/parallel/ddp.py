"""Data-parallel training of a torch module on any Phalanx group."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import UsageError
from ..group import Group, call_site
from . import replicas
from .buckets import Bucket, make_buckets

__all__ = ["DDP"]

# Gradients are averaged from inside backward: the user's line is the one that called it.
call_site.add_library(f"{Path(torch.__file__).parent}/")


class DDP(nn.Module):  # type: ignore[misc]
    """Wraps a module: every rank runs it on its own data, and gradients are the mean over all ranks.

    ```python
    model = px.parallel.DDP(model, world)
    loss = loss_function(model(inputs), targets)
    loss.backward()                              # gradients are averaged while it runs
    optimizer.step()
    ```

    Gradients lie in a few buckets, in the group's shared segment where there is one. A bucket is averaged as soon as
    all of its gradients are there, while backward goes on. All ranks end with the same bits.

    Args:
        module: On the CPU, with the same parameters on all ranks; the values of `root` are taken.
        group: The ranks that train together.
        bucket_bytes: Gradients that are averaged together.
        broadcast_buffers: Whether buffers (as of batch normalisation) are those of rank 0 at every forward in training.
        find_unused_parameters: Whether a pass may leave parameters out. Those that no rank used keep no gradient.
        root: Whose parameters all ranks begin with.
        timeout: Seconds for each operation; the group's, if not given.

    Raises:
        UsageError: The module has no parameters to train, or some that are not on the CPU.
        Desync: The ranks have different modules; names the parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        *,
        bucket_bytes: int = 25 << 20,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        root: int = 0,
        timeout: float | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
            raise UsageError(f"bucket_bytes={bucket_bytes!r} is not valid (expected a number of bytes above 0)")
        self.module = module
        self.group = group
        self._broadcast_buffers = broadcast_buffers
        self._find_unused = find_unused_parameters
        self._timeout = timeout
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._check(trained)
        self.broadcast_parameters(root)
        self._buckets = make_buckets(trained, group, bucket_bytes)
        self._launched = 0
        """Buckets of this pass whose averaging has begun: on all ranks in the same order."""
        self._syncs = True
        self._under_way = False
        self._joining = False
        self._handles = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._ready, bucket, place))
            for bucket in self._buckets
            for place, parameter in enumerate(bucket.parameters)
        ]

    def _check(self, trained: list[nn.Parameter]) -> None:
        if not trained:
            raise UsageError("the module has no parameters that require gradients")
        for parameter in self.module.parameters():
            if parameter.device.type != "cpu":
                name = self._names[id(parameter)]
                raise UsageError(f"parameter {name!r} is on {parameter.device} (expected the CPU)")
        words = {
            name: f"{tuple(parameter.shape)} {parameter.dtype} {parameter.requires_grad}"
            for name, parameter in self.module.named_parameters()
        }
        replicas.check_alike(words, self.group, "the ranks have different modules", timeout=self._timeout)

    # -- what a training loop calls ------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module. In training, buffers are made those of rank 0 first."""
        if torch.is_grad_enabled() and self.training and self._syncs:
            if self._joining and not self._still_training(True):
                raise UsageError("all ranks have joined, but this one goes on")
            self._begin()
        return self.module(*args, **kwargs)

    def broadcast_parameters(self, root: int = 0) -> None:
        """Makes the parameters and buffers of all ranks those of `root`."""
        with torch.no_grad():
            for tensor in [*self.module.parameters(), *self.module.buffers()]:
                self.group.broadcast(tensor.data, root, timeout=self._timeout)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward only adds to this rank's gradients; the next one outside averages the sum."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def sync_gradients(self) -> None:
        """Averages the gradients as they are now: after `no_sync`, or after gradients that were made by hand."""
        for bucket in self._buckets:
            bucket.begin()
            for place in range(len(bucket.parameters)):
                bucket.ready(place)
        self._launched = 0
        self._launch_ready()
        self._wait()

    def verify_replicas(self) -> None:
        """Whether all ranks have the same parameters and buffers, bit for bit.

        Raises:
            Desync: They have not; names them and the ranks.
        """
        replicas.verify(
            {name: tensor.data for name, tensor in self._named_tensors()}, self.group, timeout=self._timeout
        )

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """For ranks with different numbers of batches: who is done first takes part with zeros until all are.

        The mean still divides by the number of all ranks. At the end all ranks have the same parameters only if they
        took the same steps: a rank that is done makes none, so the last one's are broadcast.
        """
        self._joining = True
        try:
            yield
        except BaseException:
            self._joining = False
            raise
        try:
            steps = 0
            while self._still_training(False):
                self._shadow()
                steps += 1
            last = np.array([self.group.rank if steps == 0 else -1], np.int64)
            self.group.all_reduce(last, op="max", timeout=self._timeout)
            self.broadcast_parameters(int(last[0]))
        finally:
            self._joining = False

    def close(self) -> None:
        """Takes the hooks off the module, which keeps its gradients."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # -- one pass ------------------------------------------------------------------------------------------------------

    def _named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.module.named_parameters()
        yield from self.module.named_buffers()

    def _begin(self) -> None:
        """Before a forward whose backward will be averaged."""
        if self._broadcast_buffers:
            with torch.no_grad():
                for buffer in self.module.buffers():
                    self.group.broadcast(buffer.data, 0, timeout=self._timeout)
        for bucket in self._buckets:
            bucket.begin()
        self._launched = 0
        self._under_way = False

    def _ready(self, bucket: Bucket, place: int, _parameter: torch.Tensor) -> None:
        """Backward has finished a gradient."""
        if not self._syncs:
            return
        if not self._under_way:
            self._under_way = True
            # Runs when this backward is over, in the thread that called it.
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        if place not in bucket.missing:
            return
        if bucket.ready(place):
            self._launch_ready()

    def _launch_ready(self) -> None:
        while self._launched < len(self._buckets) and not self._buckets[self._launched].missing:
            bucket = self._buckets[self._launched]
            bucket.work = self.group.all_reduce(bucket.flat, op="mean", async_op=True, timeout=self._timeout)
            self._launched += 1

    def _finish(self) -> None:
        """The end of backward: everything is averaged when it returns."""
        self._under_way = False
        unused = [(bucket, place) for bucket in self._buckets for place in bucket.missing]
        if unused and not self._find_unused:
            names = ", ".join(sorted(self._names[id(b.parameters[p])] for b, p in unused)[:5])
            raise UsageError(
                f"{len(unused)} parameters got no gradient in this pass ({names}, ...): say "
                "find_unused_parameters=True, on all ranks"
            )
        for bucket, place in unused:
            bucket.ready(place)
        self._launch_ready()
        self._wait()
        if self._find_unused:
            self._drop_unused({(id(bucket), place) for bucket, place in unused})

    def _wait(self) -> None:
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None

    def _drop_unused(self, unused: set[tuple[int, int]]) -> None:
        """Parameters that no rank used keep no gradient, as in training on one rank."""
        places = [(bucket, place) for bucket in self._buckets for place in range(len(bucket.parameters))]
        used = np.array([(id(bucket), place) not in unused for bucket, place in places], np.uint8)
        self.group.all_reduce(used, op="max", timeout=self._timeout)
        for (bucket, place), is_used in zip(places, used, strict=True):
            if not is_used:
                bucket.parameters[place].grad = None

    # -- ranks with different numbers of batches -----------------------------------------------------------------------

    def _still_training(self, here: bool) -> bool:
        count = np.array([here], np.int64)
        self.group.all_reduce(count, timeout=self._timeout)
        return bool(count[0])

    def _shadow(self) -> None:
        """Takes part in a step of others, with gradients of zero."""
        if self._broadcast_buffers:
            with torch.no_grad():
                for buffer in self.module.buffers():
                    self.group.broadcast(buffer.data, 0, timeout=self._timeout)
        kept = [parameter.grad for bucket in self._buckets for parameter in bucket.parameters]
        for bucket in self._buckets:
            bucket.flat.zero_()
            bucket.work = self.group.all_reduce(bucket.flat, op="mean", async_op=True, timeout=self._timeout)
        self._wait()
        if self._find_unused:
            self._drop_unused({(id(b), place) for b in self._buckets for place in range(len(b.parameters))})
        parameters = [parameter for bucket in self._buckets for parameter in bucket.parameters]
        for parameter, grad in zip(parameters, kept, strict=True):
            parameter.grad = grad
