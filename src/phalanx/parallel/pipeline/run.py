"""One run of a pipeline: a step or an evaluation, action by action.

A stage that raises does not end the run on its rank: the rank goes on through its actions without computing, and sends
`FAILED` where others wait for it. They do the same, so every message finds its receiver, and all ranks reach the end of
the run together, where they tell each other what happened. The pipeline can then be used again.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from ...errors import Desync, UsageError
from ...exception_text import type_name
from ...frames import user_stack
from ...group import Group
from . import batches
from .actions import Action
from .entrances import Entrance, enter
from .messages import (
    FAILED,
    Message,
    Mode,
    Values,
    kind_of,
    pack_gradients,
    pack_values,
    split_value,
    unpack_gradients,
    unpack_values,
)
from .schedules import PipelineSchedule
from .timeline import Span
from .wires import Wires

__all__ = ["Run"]

Outputs = list[torch.Tensor | None]
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""Of losses."""


class Run:
    """A step or an evaluation.

    Args:
        schedule: The order of actions.
        group: The ranks.
        stages: Those of this rank, by number.
        mode: What to run: an evaluation has no backwards.
        inputs: The batch; on the rank of the first stage.
        targets: What the loss compares with, or None; on the rank of the last stage.
        loss_fn: Of output and targets; on the rank of the last stage. Without it there are outputs only.
        mean: Whether the loss is a mean over examples, rather than a sum.
        timeout: Seconds for each message; the group's, if not given.
    """

    def __init__(
        self,
        schedule: PipelineSchedule,
        group: Group,
        stages: Mapping[int, nn.Module],
        mode: Mode,
        *,
        inputs: Any,
        targets: Any,
        loss_fn: Callable[..., torch.Tensor] | None,
        mean: bool,
        timeout: float | None,
    ) -> None:
        self._schedule = schedule
        self._group = group
        self._stages = stages
        self._mode: Mode = mode
        self._inputs = inputs
        self._targets = targets
        self._loss_fn = loss_fn
        self._mean = mean
        self._timeout = timeout
        self._wires = Wires(schedule, group, mode, timeout)
        self._held: dict[tuple[int, int], tuple[list[Entrance | None], Outputs]] = {}
        """For the backward of a stage and a micro-batch: where it ends and where it begins."""
        self._weights: dict[int, float] = {}
        self._stopped = False
        """Whether this rank only passes failures on."""
        self._error: BaseException | None = None
        """The error of this rank's stages."""
        self._words: tuple[str, str] | None = None
        """Its type and its traceback."""
        self._loss: torch.Tensor | None = None
        """That of the micro-batches so far, on the rank of the last stage."""
        self.loss = torch.zeros(())
        """The loss of the batch, on all ranks."""
        self.failure: BaseException | None = None
        """The error for this rank to raise: that of its stage, or a `Desync` with the traceback of another's."""
        self.outputs: list[Any] = []
        """The outputs of the last stage, in an evaluation without a loss."""
        self.spans: list[Span] = []
        self.ended = 0.0

    def execute(self) -> None:
        """Runs everything. All ranks return together, also if a stage of one raised."""
        order = self._schedule.orders[self._group.rank]
        if self._mode == "evaluate":
            order = [action for action in order if action.kind == "F"]
        with torch.set_grad_enabled(self._mode == "step"):
            for action, following in zip(order, [*order[1:], None], strict=True):
                message = self._wires.receive(action)
                if following is not None:
                    self._wires.expect(following)
                self._wires.send(action, self._take(action, message))
        self._wires.flush()
        self._agree()

    # -- actions -------------------------------------------------------------------------------------------------------

    def _take(self, action: Action, message: Message | None) -> Message:
        """Runs an action, and gives the message that its result is."""
        is_last = action.kind == "B" and action.microbatch == self._schedule.microbatches - 1
        if message is not None and kind_of(message) == "failed":
            self._stop(None)
        if self._stopped:
            if is_last:
                self._fail_sync(self._stages[action.stage])
            return FAILED
        began = time.monotonic()
        stage = self._stages[action.stage]
        synced = False
        try:
            with _unsynced(stage):
                made = self._forward(action, message) if action.kind == "F" else self._backward(action, message)
            self.spans.append(Span(action, began, time.monotonic()))
            if is_last and hasattr(stage, "sync_gradients"):
                synced = True
                stage.sync_gradients()
            return made
        except Exception as error:
            self._stop(error)
            if is_last and not synced:
                self._fail_sync(stage)
            return FAILED

    def _forward(self, action: Action, message: Message | None) -> Message:
        stage, microbatch = action.stage, action.microbatch
        if message is None:
            batch = self._input_batch
            value = batch.parts[microbatch]
            single = not isinstance(value, tuple)
            tensors = (value,) if single else value
            entries: list[Entrance | None] = []
            values = Values(tensors, single, batch.size(microbatch), batch.length)
        else:
            values, wants = unpack_values(message)
            tensors, entries = enter(values.tensors, wants)
        output = self._stages[stage](*tensors)
        if stage == self._schedule.stages - 1:
            self._finish(output, values, microbatch, entries)
            return FAILED  # there is nobody to send it to
        passed = split_value(output, stage, values.examples, values.of)
        if self._mode == "step":
            self._held[stage, microbatch] = entries, list(passed.tensors)
        return pack_values(passed, self._mode)

    def _finish(self, output: Any, values: Values, microbatch: int, entries: list[Entrance | None]) -> None:
        """The end of a forward in the last stage."""
        if self._loss_fn is None:
            self.outputs.append(output)
            return
        if self._targets is None:
            loss = self._loss_fn(output)
        else:
            batch = self._target_batch
            if batch.length != values.of:
                raise UsageError(f"there are {values.of} inputs and {batch.length} targets (expected as many)")
            loss = self._loss_fn(output, batch.parts[microbatch])
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise UsageError(f"loss_fn returned {type(loss).__name__} (expected a tensor of one element)")
        weight = values.examples / values.of if self._mean else 1.0
        part = loss.detach() * weight
        self._loss = part if self._loss is None else self._loss + part
        if self._mode == "step":
            self._weights[microbatch] = weight
            self._held[self._schedule.stages - 1, microbatch] = entries, [loss]

    def _backward(self, action: Action, message: Message | None) -> Message:
        entries, outputs = self._held.pop((action.stage, action.microbatch))
        if message is None:
            (loss,) = outputs
            assert loss is not None
            gradients: Outputs = [torch.full_like(loss, self._weights.pop(action.microbatch))]
        else:
            gradients = unpack_gradients(message)
        wanted = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if output is not None and gradient is not None
        ]
        if wanted:
            torch.autograd.backward(*zip(*wanted, strict=True))
        return pack_gradients([None if entry is None else entry.gradient for entry in entries])

    @functools.cached_property
    def _input_batch(self) -> batches.Batch:
        return batches.split(self._inputs, self._schedule.microbatches, "inputs")

    @functools.cached_property
    def _target_batch(self) -> batches.Batch:
        return batches.split(self._targets, self._schedule.microbatches, "targets")

    # -- failures and the end ------------------------------------------------------------------------------------------

    def _stop(self, error: BaseException | None) -> None:
        self._stopped = True
        self._held.clear()
        if error is not None:
            self._error = error
            self._words = type_name(error), user_stack(error)

    def _fail_sync(self, stage: nn.Module) -> None:
        """Lets the replicas of a stage know that it has no gradients to give."""
        if hasattr(stage, "fail_sync"):
            stage.fail_sync()

    def _agree(self) -> None:
        """Tells all ranks the loss, and whether a stage raised."""
        words = np.zeros(2 + self._group.world_size)
        if self._loss is not None:
            words[:2] = float(self._loss), DTYPES.index(self._loss.dtype) if self._loss.dtype in DTYPES else 0
        words[2 + self._group.rank] = self._error is not None
        self._group.all_reduce(words, timeout=self._timeout)
        self.ended = time.monotonic()
        self.loss = torch.tensor(words[0], dtype=DTYPES[int(words[1])])
        if not words[2:].any():
            return
        everyone = self._group.all_gather_object(self._words, timeout=self._timeout)
        first = next(rank for rank, said in enumerate(everyone) if said is not None)
        peer, (name, text) = self._group.members[first], everyone[first]
        self.failure = self._error or Desync(
            f"a stage of rank {peer} raised {name}, so the pipeline did not finish this {self._mode} (to go on, drop "
            f"the gradients on all ranks)\n\nTraceback of rank {peer}:\n{text.rstrip()}",
            peer=peer,
        )


@contextlib.contextmanager
def _unsynced(stage: nn.Module) -> Iterator[None]:
    """Leaves the gradients of a stage that is wrapped for data parallelism alone until the last micro-batch is done."""
    if hasattr(stage, "no_sync") and hasattr(stage, "sync_gradients"):
        with stage.no_sync():
            yield
    else:
        yield
