"""Data-parallel training of a torch module on any Phalanx group."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from ..errors import UsageError
from ..group import Group
from ..group.tracking import call_site
from . import replicas
from .reducer import GradientReducer
from .sync_batch_norm import SyncBatchNorm
from .uneven import Exchange, UnevenInputs

__all__ = ["DDP"]

# Gradients are averaged from inside backward: the user's line is the one that called it.
call_site.add_library(f"{Path(torch.__file__).parent}/")

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)
"""Of parameters that can be trained."""


class DDP(nn.Module):  # type: ignore[misc]
    """Wraps a module: every rank runs it on its own data, and gradients are the mean over all ranks.

    ```python
    model = px.parallel.DDP(model, world)
    loss = loss_function(model(inputs), targets)
    loss.backward()                              # gradients are averaged while it runs
    optimizer.step()
    ```

    A backward through an output of the wrapper averages the gradients, in training mode and in evaluation mode alike. A
    bucket of gradients is averaged as soon as all of them are there, while backward goes on. All ranks end with the
    same bits. If backward raises on one rank, it raises on all, and no gradients are averaged.

    Args:
        module: On the CPU, with the same parameters on all ranks; the values of `root` are taken.
        group: The ranks that train together.
        bucket_bytes: Gradients that are averaged together.
        broadcast_buffers: Whether buffers (as of batch normalisation) are made those of rank 0 before a forward that
            follows one whose gradients are averaged.
        find_unused_parameters: Whether a backward may leave parameters out. Those that no rank used keep no gradient.
        root: Whose parameters all ranks begin with.
        timeout: Seconds for each operation; the group's, if not given.

    Raises:
        UsageError: The module has no parameters to train, or some that cannot be averaged.
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
        self._bucket_bytes = bucket_bytes
        self._broadcast_buffers = broadcast_buffers
        self._find_unused = find_unused_parameters
        self._timeout = timeout
        self._syncs = True
        self._buffers_due = True
        """Whether buffers may differ: the last forward was one whose gradients are averaged."""
        self._uneven = UnevenInputs(group, timeout)
        trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        self._check(trained)
        self.broadcast_parameters(root)
        self._reducer = self._make_reducer(trained)

    def _check(self, trained: Mapping[str, nn.Parameter]) -> None:
        """Refuses what cannot be trained, and compares the modules of all ranks."""
        if not trained:
            raise UsageError("the module has no parameters that require gradients")
        for name, parameter in self.module.named_parameters():
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise UsageError(f"parameter {name!r} has no shape yet (call the module once before you wrap it)")
            if parameter.device.type not in ("cpu", "cuda"):
                raise UsageError(f"parameter {name!r} is on {parameter.device} (expected the CPU or a GPU of CUDA)")
        for name, parameter in trained.items():
            if parameter.dtype not in DTYPES or parameter.layout != torch.strided:
                raise UsageError(
                    f"parameter {name!r} has {parameter.dtype} and {parameter.layout}, whose gradients cannot be "
                    "averaged (expected a dense tensor of a floating-point or complex dtype, or requires_grad=False)"
                )
        for name, part in self.module.named_modules():
            if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse and part.weight.requires_grad:
                raise UsageError(
                    f"the embedding {name or 'that is wrapped'!r} makes sparse gradients (expected sparse=False)"
                )
        words = {
            name: f"{tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}" for name, tensor in self._tensors()
        }
        words["the options"] = f"{self._bucket_bytes} {self._broadcast_buffers} {self._find_unused}"
        replicas.check_alike(words, self.group, "the ranks have different modules", timeout=self._timeout)

    def _make_reducer(self, parameters: Mapping[str, nn.Parameter]) -> GradientReducer:
        return GradientReducer(
            parameters,
            self.group,
            bucket_bytes=self._bucket_bytes,
            find_unused=self._find_unused,
            uneven=self._uneven,
            timeout=self._timeout,
        )

    # -- what a training loop calls ------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module. Buffers are made those of rank 0 first, where they may differ."""
        averages = self._syncs and torch.is_grad_enabled()
        if averages:
            self._take_up_unfrozen()
        if self._buffers_due and self._broadcast_buffers and next(self.module.buffers(), None) is not None:
            self._broadcast(self.module.buffers(), self._uneven.announce(Exchange.BUFFERS))
        output = self.module(*args, **kwargs)
        self._buffers_due = averages
        if averages:
            self._reducer.watch(output)
        elif torch.is_grad_enabled():
            self._reducer.disarm()
        return output

    def broadcast_parameters(self, root: int = 0) -> None:
        """Makes the parameters and buffers of all ranks those of `root`."""
        self._broadcast((tensor for _, tensor in self._tensors()), root)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """The backward of a forward inside only adds to this rank's gradients; the next one outside averages the sum.

        As in torch, the forward decides: it has to be inside.
        """
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def sync_gradients(self) -> None:
        """Averages the gradients as they are now: after `no_sync`, or after gradients that were made by hand.

        Gradients that are None count as zero; those that are None on all ranks stay None.

        Raises:
            As backward.
        """
        self._reducer.average_now()

    def fail_sync(self) -> None:
        """Takes part in a `sync_gradients` of the other ranks without any: they raise `Desync`. Waits for nothing."""
        self._reducer.fail_now()

    def verify_replicas(self) -> None:
        """Whether all ranks have the same parameters and buffers, bit for bit.

        Raises:
            Desync: They have not; names them and the ranks.
        """
        replicas.verify({name: tensor.data for name, tensor in self._tensors()}, self.group, timeout=self._timeout)

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """For ranks with different numbers of batches: a rank that is done takes part with zeros until all are.

        The mean still divides by the number of all ranks. A rank that is done makes no steps, so at the end the
        parameters of the last one are broadcast. Buffers are those of the highest rank that still trains.
        """
        self._uneven.on = True
        try:
            yield
            is_last = True
            while True:
                what, rank = self._uneven.listen()
                if what is Exchange.NOTHING:
                    break
                is_last = False
                if what is Exchange.BUFFERS:
                    self._broadcast(self.module.buffers(), rank)
                else:
                    self._reducer.accompany()
            last = self._uneven.highest(is_last)
            self._broadcast(self.module.parameters(), last)
            if self._broadcast_buffers:
                self._broadcast(self.module.buffers(), last)
        finally:
            self._uneven.on = False

    def use_group(self, group: Group) -> None:
        """Averages among the ranks of another group from now on, as when the world has changed. All of them call it.

        Nothing is compared and no values are sent: their modules must be alike already, as they are where
        `px.elastic.steps` has this one in its state, and calls this. The layers of `SyncBatchNorm` in the module that
        are in the group so far go with it.

        Raises:
            UsageError: It is called inside of `join`.
        """
        if group is self.group:
            return
        if self._uneven.on:
            raise UsageError("this DDP cannot be given another group inside of join()")
        for layer in self.module.modules():
            if isinstance(layer, SyncBatchNorm) and layer.group is self.group:
                layer.group = group
        self.group = group
        self._uneven = UnevenInputs(group, self._timeout)
        self._buffers_due = True  # on all ranks alike, whatever their last forward was
        self._replace_reducer({name: each for name, each in self.module.named_parameters() if each.requires_grad})

    def close(self) -> None:
        """Takes the hooks off the module, which keeps its gradients."""
        self._reducer.close()

    # -- copies --------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> DDP:
        """A wrapper of its own around a copy of the module, in the same group. Nothing is sent."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        memo[id(self.group)] = self.group
        apart = ("_reducer", "_uneven")
        made.__dict__ = {name: copy.deepcopy(value, memo) for name, value in vars(self).items() if name not in apart}
        made._uneven = UnevenInputs(self.group, self._timeout)
        made._reducer = made._make_reducer(
            {name: parameter for name, parameter in made.module.named_parameters() if parameter.requires_grad}
        )
        return made

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise UsageError("a DDP cannot be pickled, because its group cannot (save its .module, or its state_dict())")

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.module.named_parameters()
        yield from self.module.named_buffers()

    def _broadcast(self, tensors: Iterable[torch.Tensor], root: int) -> None:
        for tensor in tensors:
            self.group.broadcast(tensor.data, root, timeout=self._timeout)

    def _take_up_unfrozen(self) -> None:
        """Makes new buckets if parameters require gradients that did not so far. All ranks do, or they get an error."""
        reducer = self._reducer
        if all(reducer.has(parameter) for parameter in self.module.parameters() if parameter.requires_grad):
            return
        if self._uneven.on:
            raise UsageError("more parameters require gradients than before (change requires_grad outside of join())")
        named = dict(self.module.named_parameters())
        wanted = {name: each for name, each in named.items() if each.requires_grad or reducer.has(each)}
        self._check(wanted)
        self._broadcast((each for each in wanted.values() if not reducer.has(each)), 0)
        self._replace_reducer(wanted)

    def _replace_reducer(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._reducer.close()
        self._reducer.replaced = True
        self._reducer = self._make_reducer(parameters)
