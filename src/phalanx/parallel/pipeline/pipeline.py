"""Pipeline-parallel training of a torch model on any Phalanx group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NoReturn

import torch
from torch import nn

from ...arguments import shown
from ...checkpoint import Shard
from ...errors import Desync, UsageError
from ...frames import hides_frames
from ...group import Group
from ..ddp import DDP
from . import batches
from .messages import Mode
from .report import PipelineReport
from .run import Run
from .schedules import PipelineSchedule
from .stages import SequentialPart, all_stages

__all__ = ["Pipeline"]


class Pipeline(nn.Module):  # type: ignore[misc]
    """A model whose stages are on different ranks. A batch passes through them in micro-batches.

    ```python
    pipeline = px.parallel.Pipeline(model, world, microbatches=8)      # model is an nn.Sequential
    optimizer = torch.optim.AdamW(pipeline.parameters())               # of this rank's stages
    for inputs, targets in data:
        optimizer.zero_grad()
        loss = pipeline.step(inputs, targets, cross_entropy)           # the same on all ranks
        optimizer.step()
    ```

    A stage is called with what the one before returned, a tuple as several arguments. It may return a tensor or a tuple
    of tensors and None; those that need no gradients, as masks and indices, get none. Shapes may differ between
    micro-batches and between steps. The gradients are those of a single process that takes the micro-batches one after
    the other, to the last bit. Stages are on the CPU.

    As a module, a pipeline has the parameters and buffers of this rank's stages: `parameters`, `state_dict`, `train`
    and so on. Their names are those in the `nn.Sequential` that was cut, or in `nn.Sequential(*stages)`.

    Args:
        stages: An `nn.Sequential`, which is cut into stages; or a list with a module for each stage, in which those of
            other ranks may be None. Stage s is on rank s modulo the number of ranks. This object holds those of this
            rank only: drop the model, and the memory of the others is free.
        group: The ranks.
        schedule: `"1f1b"`, `"gpipe"` or `"interleaved"`, which has several stages per rank; see `PipelineSchedule`.
        microbatches: The parts of a batch. The first ones are longer by one where a batch cannot be split evenly.
        stages_per_rank: Of `"interleaved"`; 2, if an `nn.Sequential` is cut.
        cuts: Where to cut an `nn.Sequential`: the index of the first layer of every stage but the first. By default so
            that the stage with the most parameters has as few as possible.
        wrap: Called with each of this rank's stages, for the stage to use instead, as
            `lambda stage: px.parallel.DDP(stage, mesh["replica"])`. What has `no_sync` and `sync_gradients` averages
            gradients once per step, after the last micro-batch.
        timeout: Seconds for each message; the group's, if not given.

    Raises:
        UsageError: The stages do not fit the ranks, two ranks share a parameter, or another argument is not valid.
        Desync: The ranks have different pipelines; names what differs.
    """

    @hides_frames
    def __init__(
        self,
        stages: nn.Sequential | Sequence[nn.Module | None],
        group: Group,
        *,
        schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b",
        microbatches: int,
        stages_per_rank: int | None = None,
        cuts: Sequence[int] | None = None,
        wrap: Callable[[nn.Module], nn.Module] | None = None,
        timeout: float | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(group, Group):
            raise UsageError(f"group={shown(group)} is not valid (expected a Group)")
        per_rank = stages_per_rank
        if per_rank is None and schedule == "interleaved" and isinstance(stages, nn.Sequential):
            per_rank = 2
        found = all_stages(stages, group.world_size, per_rank, cuts)
        self.group = group
        self.schedule = PipelineSchedule(
            schedule,
            ranks=group.world_size,
            microbatches=microbatches,
            stages_per_rank=len(found) // group.world_size,
        )
        self._timeout = timeout
        self._last: Run | None = None
        self._busy: Mode | None = None
        """The run under way, or the one that did not come to its end."""
        self._stages: dict[int, nn.Module] = {}
        self._prefixes: dict[int, str] = {}
        """The beginning of the names inside of a stage: nothing, if its layers have those of the whole model."""
        for index, stage in enumerate(found):
            if self.schedule.rank_of(index) == group.rank:
                if stage is None:
                    raise UsageError(f"stage {index} is None, but it is on this rank (expected a module)")
                self._stages[index] = self._register(index, stage, wrap)
                self._prefixes[index] = "" if isinstance(stage, SequentialPart) else f"{index}."
        self._check_alike()

    def _register(self, index: int, stage: nn.Module, wrap: Callable[[nn.Module], nn.Module] | None) -> nn.Module:
        """Takes a stage as a part of this module. Layers of a Sequential keep their names."""
        made = stage if wrap is None else wrap(stage)
        if not isinstance(made, nn.Module):
            raise UsageError(f"wrap returned {shown(made)} (expected a module)")
        if isinstance(made, nn.parallel.DistributedDataParallel):
            raise UsageError(
                "torch's DistributedDataParallel expects a backward after each forward, which no pipeline does "
                "(expected px.parallel.DDP)"
            )
        if isinstance(made, SequentialPart):
            for name, layer in made._modules.items():
                self._add(name, layer)
        else:
            self._add(str(index), made)
        return made

    def _add(self, name: str, layer: nn.Module) -> None:
        try:
            self.add_module(name, layer)
        except KeyError as error:
            raise UsageError(f"a layer cannot be called {name!r} in a pipeline ({error.args[0]})") from None

    def _check_alike(self) -> None:
        """Compares the pipelines of all ranks.

        Raises:
            Desync: They differ; says how.
        """
        schedule = self.schedule
        mine = {
            "schedule": schedule.name,
            "microbatches": schedule.microbatches,
            "stages": schedule.stages,
        }
        everyone = self.group.all_gather_object(mine, timeout=self._timeout)
        for name in mine:
            ranks: dict[Any, list[int]] = {}
            for rank, words in enumerate(everyone):
                ranks.setdefault(words[name], []).append(self.group.members[rank])
            if len(ranks) > 1:
                sides = ", ".join(f"{value!r} on ranks {', '.join(map(str, on))}" for value, on in ranks.items())
                raise Desync(f"the ranks have different pipelines: {name} is {sides}")

    # -- what a training loop calls ------------------------------------------------------------------------------------

    @hides_frames
    def step(
        self,
        inputs: Any = None,
        targets: Any = None,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        *,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> torch.Tensor:
        """Forward and backward of a batch. Adds to the gradients of this rank's stages.

        Args:
            inputs: A tensor, or a tuple of tensors of the same length, for the first stage. Ignored on other ranks than
                that of the first stage.
            targets: Likewise, for the loss. Ignored on other ranks than that of the last stage, as is `loss_fn`.
            loss_fn: Called with the output of a micro-batch and its targets; without targets, with the output.
            reduction: Whether the loss of a batch is the mean over its examples, or their sum.

        Returns:
            The loss of the batch, on all ranks, without a graph.

        Raises:
            Exception: Whatever a stage of this rank raised. Gradients are then incomplete on all ranks.
            Desync: A stage of another rank raised; the message has its traceback.
            PeerLost: A rank is lost.
        """
        return self._loss("step", inputs, targets, loss_fn, reduction)

    @hides_frames
    def evaluate(
        self,
        inputs: Any = None,
        targets: Any = None,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        *,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> torch.Tensor:
        """The loss of a batch, on all ranks, without gradients. As `step` otherwise."""
        return self._loss("evaluate", inputs, targets, loss_fn, reduction)

    @hides_frames
    def forward(self, inputs: Any = None) -> Any:
        """The output of the last stage for a batch, without gradients.

        Returns:
            On the rank of the last stage, the outputs of all micro-batches, put together along the first dim; None on
            other ranks.

        Raises:
            As `step`.
        """
        run = self._run("evaluate", inputs, None, None, mean=True)
        return batches.joined(run.outputs) if run.outputs else None

    @hides_frames
    def report(self) -> PipelineReport:
        """How long the last step took and where ranks waited. All ranks call it.

        Raises:
            UsageError: There was no step yet.
        """
        run = self._last
        if run is None:
            raise UsageError("there was no step yet (call step first)")
        mine = [(tuple(span.action), span.begin - run.ended, span.end - run.ended) for span in run.spans]
        return PipelineReport.of(self.schedule, self.group.all_gather_object(mine, timeout=self._timeout))

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank's stages: of a stage inside of an `FSDP`, this rank's shards."""
        lead = f"{prefix}." if prefix else ""
        for own, stage in self._named_stages():
            yield from stage.named_parameters(f"{lead}{own}".removesuffix("."), recurse, remove_duplicate)

    def _named_stages(self) -> Iterator[tuple[str, nn.Module]]:
        """The stages, each with the beginning of the names inside of it."""
        for index, stage in self._stages.items():
            yield self._prefixes[index], stage.module if isinstance(stage, DDP) else stage

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Parameters and buffers of this rank's stages; of a stage inside of an `FSDP`, parts of them."""
        found: dict[str, Any] = {} if destination is None else destination
        for own, stage in self._named_stages():
            stage.state_dict(destination=found, prefix=f"{prefix}{own}", keep_vars=keep_vars)
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Takes parameters and buffers of this rank's stages, by their names in the whole model.

        Args:
            strict: Whether there must be all of them, and none of other ranks.

        Raises:
            UsageError: That is not so.
        """
        missing, used = [], set()
        for own, stage in self._named_stages():
            names = [f"{own}{name}" for name in stage.state_dict()]
            missing += [name for name in names if name not in state_dict]
            used.update(names)
            part = {name.removeprefix(own): state_dict[name] for name in names if name in state_dict}
            stage.load_state_dict(part, strict=False, assign=assign)
        unknown = [name for name in state_dict if name not in used]
        if strict and (missing or unknown):
            words = [f"it has no {name}" for name in missing[:1]] + [
                f"{name} is not on this rank" for name in unknown[:1]
            ]
            raise UsageError(f"the state does not fit this rank's stages: {', '.join(words)} (see strict=False)")
        return nn.modules.module._IncompatibleKeys(missing, unknown)

    @hides_frames
    def checkpoint_state(self) -> dict[str, Any]:
        """The parameters and buffers of all ranks, for `px.checkpoint.save`. All ranks call it.

        ```python
        px.checkpoint.save("step-100", pipeline.checkpoint_state(), world)
        pipeline.load_state_dict(px.checkpoint.load("step-100", world), strict=False)
        ```

        Each rank writes its own; of stages inside of an `FSDP`, its rows. The names are those of the whole model, so
        any number of ranks loads them, also one without a pipeline.
        """
        mine = self.state_dict()
        # Tensors without dims cannot be held in parts, and are short: all ranks get them.
        told = {
            name: (tuple(value.shape), str(_tensor(value).dtype), value.detach() if _is_scalar(value) else None)
            for name, value in mine.items()
        }
        found: dict[str, Any] = {}
        for each in self.group.all_gather_object(told, timeout=self._timeout):
            for name, (shape, dtype, scalar) in each.items():
                value = mine.get(name, torch.empty(0, *shape[1:], dtype=getattr(torch, dtype.removeprefix("torch."))))
                if scalar is not None:
                    found[name] = scalar
                else:
                    found[name] = value if isinstance(value, Shard) else Shard(value, shape, [0] * len(shape))
        return found

    @property
    def local_stages(self) -> Mapping[int, nn.Module]:
        """The stages of this rank, by number."""
        return MappingProxyType(self._stages)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _loss(self, mode: Mode, inputs: Any, targets: Any, loss_fn: Any, reduction: str) -> torch.Tensor:
        if reduction not in ("mean", "sum"):
            raise UsageError(f"reduction={shown(reduction)} is not valid (expected 'mean' or 'sum')")
        return self._run(mode, inputs, targets, loss_fn or _missing, mean=reduction == "mean").loss

    def _run(self, mode: Mode, inputs: Any, targets: Any, loss_fn: Any, *, mean: bool) -> Run:
        if self._busy is not None:
            raise UsageError(f"{self._busy}() of this pipeline did not come to its end (make a new one to go on)")
        run = Run(
            self.schedule,
            self.group,
            self._stages,
            mode,
            inputs=inputs,
            targets=targets,
            loss_fn=loss_fn,
            mean=mean,
            timeout=self._timeout,
        )
        self._busy = mode
        run.execute()
        self._busy = None
        if run.failure is not None:
            raise run.failure
        if mode == "step":
            self._last = run
        return run

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise UsageError("a Pipeline cannot be pickled, because its group cannot (save its state_dict())")


def _missing(*_: Any) -> NoReturn:
    """Stands for a loss that was not given. It is an error of the last stage, of which the other ranks hear."""
    raise UsageError("loss_fn is missing (expected a function of output and targets on the last rank)")


def _tensor(value: Any) -> torch.Tensor:
    found: torch.Tensor = value.array if isinstance(value, Shard) else value
    return found


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.dim()
