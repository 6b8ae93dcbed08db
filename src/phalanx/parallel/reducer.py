"""The reducer: averages gradients while backward runs.

One pass is one backward through outputs of the wrapped module. It begins when backward reaches such an output, and ends
in a callback of autograd when that backward is over, however many others it has run inside (as re-entrant checkpointing
does). On every rank a pass is the same sequence of operations:

1. one average per bucket, always in the same order; each begins as soon as it can, while backward goes on;
2. one short all_reduce of the ranks' `PassReport`s: who failed, which buckets grew after they were sent, and
   what was used;
3. another average of the buckets that grew.

A backward that raises does not call its callback, but drops it. The pass then sends the rest of its sequence and
reports that it failed, so that the other ranks raise in their backward instead of waiting, and all can go on together.
Gradients are written only after the reports: a pass that failed on one rank changes none on any.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import Desync, PhalanxError, UsageError
from ..group import Group, Work
from . import replicas
from .autograd_nodes import EndOfBackward, accumulator_of, nodes_of
from .buckets import make_buckets
from .pass_report import PassReport
from .uneven import Exchange, UnevenInputs

__all__ = ["GradientReducer"]

SHOWN = 5
"""Names that a message lists."""


class GradientReducer:
    """Averages the gradients of some parameters of a module.

    Args:
        parameters: By name. Those that do not require gradients just now get none.
        group: The ranks that train together.
        bucket_bytes: Gradients that are averaged together.
        find_unused: Whether a backward may leave parameters out.
        uneven: Tells ranks that are done about each pass.
        timeout: Seconds for each operation; the group's, if not given.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: Group,
        *,
        bucket_bytes: int,
        find_unused: bool,
        uneven: UnevenInputs,
        timeout: float | None,
    ) -> None:
        self.group = group
        self.find_unused = find_unused
        self.uneven = uneven
        self.timeout = timeout
        self.buckets = make_buckets(list(parameters.values()), group, bucket_bytes)
        self.parameters = [parameter for bucket in self.buckets for parameter in bucket.parameters]
        self.bucket_of = [index for index, bucket in enumerate(self.buckets) for _ in bucket.parameters]
        self.early = True
        """Whether buckets are averaged while backward runs. Not after a bucket grew once it had been sent."""
        self.current: Pass | None = None
        self.unfinished: list[Work[Any]] = []
        """Operations of a pass that failed. They may still use the buckets."""
        self.replaced = False
        """Whether another reducer has taken over."""
        self._armed = False
        """Whether the next backward belongs to a forward that wants averages. Where no output tells, this does."""
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._traits = {id(parameter): (parameter.dtype, parameter.shape) for parameter in self.parameters}
        # Autograd holds these nodes weakly, and would make new ones, without our hooks.
        self._nodes = [accumulator_of(parameter) for parameter in self.parameters]
        handles = [node.register_hook(_hook(weakref.ref(self), place)) for place, node in enumerate(self._nodes)]
        self._remove_hooks = weakref.finalize(self, _remove, handles)
        self._remove_hooks.atexit = False

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter is in a bucket that fits it."""
        return self._traits.get(id(parameter)) == (parameter.dtype, parameter.shape)

    def name(self, parameter: nn.Parameter) -> str:
        """The name of a parameter in the module."""
        return self._names[id(parameter)]

    def close(self) -> None:
        """Takes the hooks off the parameters."""
        self._remove_hooks()
        self._armed = False

    # -- what forward says ---------------------------------------------------------------------------------------------

    def watch(self, output: Any) -> None:
        """Has the gradients of the next backward through this output averaged."""
        self._armed = any(parameter.requires_grad for parameter in self.parameters)
        if not self._armed:
            return
        for node in {id(node): node for node in nodes_of(output, set())}.values():
            node.register_prehook(self._reached)

    def disarm(self) -> None:
        """Forgets the last forward: the new one wants no averages."""
        self._armed = False

    # -- what autograd says --------------------------------------------------------------------------------------------

    def _reached(self, _grads: Any) -> None:
        """Backward has come to an output of the module."""
        if self.replaced:
            raise UsageError(
                "the parameters that require gradients, or the group, have changed since this forward (call the module "
                "again)"
            )
        if self.current is None:
            self._begin()

    def fired(self, place: int, got_gradient: bool) -> None:
        """Backward has added to a gradient."""
        if self.current is None:
            if not self._armed:
                return
            # No output led here: it has no graph, or the loss is an attribute of the module.
            self._begin()
        assert self.current is not None
        self.current.mark_ready(place, got_gradient)

    def _begin(self) -> None:
        self.current = Pass(self, may_leave_out=self.find_unused)
        torch.autograd.Variable._execution_engine.queue_callback(EndOfBackward(self.current))

    def ended(self) -> None:
        """The pass is over."""
        self.current = None
        self._armed = False

    # -- without a backward --------------------------------------------------------------------------------------------

    def average_now(self) -> None:
        """Averages the gradients as they are."""
        Pass(self, may_leave_out=True).finish(even_if_empty=True)

    def fail_now(self) -> None:
        """Tells the other ranks, which average their gradients as they are, that this one cannot."""
        Pass(self, may_leave_out=True).give_up()

    def accompany(self) -> None:
        """Takes part in a pass of other ranks, with gradients of zero, and keeps its own."""
        Pass(self, may_leave_out=self.find_unused, only_zeros=True).finish(even_if_empty=True)


class Pass:
    """One sequence of operations that all ranks go through: one average of all gradients.

    Args:
        may_leave_out: Whether parameters may get no gradient.
        only_zeros: This rank has no gradients to give and wants none.
    """

    def __init__(self, reducer: GradientReducer, *, may_leave_out: bool, only_zeros: bool = False) -> None:
        self._reducer = reducer
        self._may_leave_out = may_leave_out
        self._only_zeros = only_zeros
        self._trained = [parameter.requires_grad for parameter in reducer.parameters]
        self._awaited = {place for place, trained in enumerate(self._trained) if trained}
        self._awaited_in = [0] * len(reducer.buckets)
        for place in self._awaited:
            self._awaited_in[reducer.bucket_of[place]] += 1
        self._any_ready = False
        self._announced = False
        self._sent = 0
        """Buckets whose average has begun."""
        self._grown = [False] * len(reducer.buckets)
        self._works: list[Work[Any]] = []
        self._reported = False
        self._problem: UsageError | None = None

    def mark_ready(self, place: int, got_gradient: bool) -> None:
        """Backward has added to a gradient, perhaps not for the last time."""
        reducer = self._reducer
        parameter = reducer.parameters[place]
        self._any_ready = True
        if got_gradient and parameter.grad is None and self._trained[place]:
            self._problem = UsageError(
                f"the gradient of {reducer.name(parameter)!r} was gone before it could be averaged: a hook took it (an "
                "optimizer that steps inside backward would use this rank's gradients only)"
            )
        index = reducer.bucket_of[place]
        if index < self._sent:
            # A backward inside this one came again to a parameter that was complete: wait for the end from now on.
            self._grown[index] = True
            reducer.early = False
        if place in self._awaited:
            self._awaited.discard(place)
            self._awaited_in[index] -= 1
        if reducer.early:
            # The last one is complete when backward is over, or nearly: then this thread averages it without another.
            while self._sent < len(reducer.buckets) - 1 and not self._awaited_in[self._sent]:
                self._send(wait=False)

    def finish(self, *, even_if_empty: bool = False) -> None:
        """The end of backward: all gradients are averaged when it returns.

        Raises:
            UsageError: Some gradients cannot be averaged.
            Desync: Another rank did not finish its backward, or trains other parameters.
        """
        reducer = self._reducer
        reducer.ended()
        if not (even_if_empty or self._any_ready or self._may_leave_out):
            return  # torch.autograd.grad: it makes gradients, but adds them to none
        if self._awaited and not (self._may_leave_out or self._only_zeros):
            self._problem = self._problem or self._unused()
        try:
            while self._sent < len(reducer.buckets):
                self._send(wait=self._sent == len(reducer.buckets) - 1)
            for work in self._works:
                work.wait()
            report = self._report(async_op=False)
        except BaseException:
            self.give_up()
            raise
        if self._problem is not None:
            raise self._problem
        if report.failed and self._only_zeros:
            return
        self._check(report)
        for index, grown in enumerate(report.grown):
            if grown:
                self._fill(index)
                reducer.buckets[index].average(timeout=reducer.timeout)
        if not self._only_zeros:
            self._give_out(report)

    def give_up(self) -> None:
        """Sends the rest of the sequence, with a report that this rank failed, without waiting for anything."""
        reducer = self._reducer
        if reducer.current is self:
            reducer.ended()
        with contextlib.suppress(PhalanxError):  # then the group is broken: the others hear that
            if not self._announced:
                self._announced = True
                reducer.uneven.announce_later(Exchange.GRADIENTS)
            while self._sent < len(reducer.buckets):
                self._works.append(reducer.buckets[self._sent].average_later(timeout=reducer.timeout))
                self._sent += 1
            if not self._reported:
                self._report(async_op=True, failed=True)
        reducer.unfinished.extend(self._works)

    # -- the operations ------------------------------------------------------------------------------------------------

    def _send(self, *, wait: bool) -> None:
        """Begins to average the next bucket; waits until it is done, if asked to."""
        reducer = self._reducer
        if not self._announced:
            self._announced = True
            if not self._only_zeros:
                reducer.uneven.announce(Exchange.GRADIENTS)
            while reducer.unfinished:
                reducer.unfinished.pop().wait()
        index = self._sent
        self._fill(index)
        self._sent += 1
        if wait:
            reducer.buckets[index].average(timeout=reducer.timeout)
        else:
            self._works.append(reducer.buckets[index].average_later(timeout=reducer.timeout))

    def _fill(self, index: int) -> None:
        bucket = self._reducer.buckets[index]
        if self._only_zeros:
            bucket.clear()
            return
        strange = bucket.fill(self._trained[bucket.first : bucket.first + len(bucket.parameters)])
        if strange:
            self._problem = self._problem or UsageError(
                f"the gradient of {self._reducer.name(strange[0])!r} is sparse (expected dense gradients, as of "
                "torch.nn.Embedding(..., sparse=False))"
            )

    def _report(self, *, async_op: bool, failed: bool = False) -> PassReport:
        reducer = self._reducer
        used = None
        if self._may_leave_out:
            used = [
                trained and not self._only_zeros and parameter.grad is not None
                for parameter, trained in zip(reducer.parameters, self._trained, strict=True)
            ]
        report = PassReport.make(
            failed=reducer.group.rank + 1 if failed or self._problem is not None else 0,
            trained=self._trained,
            grown=self._grown,
            used=used,
        )
        self._reported = True
        made = reducer.group.all_reduce(report.words, op="max", timeout=reducer.timeout, async_op=async_op)
        if isinstance(made, Work):
            self._works.append(made)
        return report

    def _check(self, report: PassReport) -> None:
        reducer = self._reducer
        if report.failed:
            peer = reducer.group.members[report.failed - 1]
            raise Desync(
                f"rank {peer} did not finish this backward, so no gradients were averaged (its own error says why; to "
                "go on, drop the gradients of this step on all ranks)",
                peer=peer,
            )
        if not report.trained_alike:
            words = {
                reducer.name(parameter): f"requires_grad={trained}"
                for parameter, trained in zip(reducer.parameters, self._trained, strict=True)
            }
            replicas.check_alike(words, reducer.group, "the ranks train different parameters", timeout=reducer.timeout)

    def _give_out(self, report: PassReport) -> None:
        wanted = self._trained
        if self._may_leave_out:  # parameters that no rank used keep no gradient, as in training on one rank
            wanted = [trained and used for trained, used in zip(wanted, report.used, strict=True)]
        for bucket in self._reducer.buckets:
            bucket.give_out(wanted[bucket.first : bucket.first + len(bucket.parameters)])

    def _unused(self) -> UsageError:
        reducer = self._reducer
        names = sorted(reducer.name(reducer.parameters[place]) for place in self._awaited)
        shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
        return UsageError(
            f"{len(names)} parameters got no gradient in this backward ({shown}): say find_unused_parameters=True, on "
            "all ranks"
        )


def _hook(reducer: weakref.ref[GradientReducer], place: int) -> Any:
    """Runs after all hooks of the program on that parameter, as torch's own does."""

    def hook(_inputs: Any, outputs: tuple[Any, ...]) -> None:
        found = reducer()
        if found is not None:
            found.fired(place, outputs[0] is not None)

    return hook


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()
