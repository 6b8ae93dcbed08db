"""Sharded data-parallel training of a torch module on any Phalanx group."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import nn

from ...arguments import shown
from ...checkpoint import Shard
from ...errors import UsageError
from ...group import Group, Mesh
from ...group.tracking import call_site
from ...untraced import not_inlined
from .. import replicas
from ..autograd_nodes import EndOfBackward, nodes_of
from ..ddp import DDP
from . import optimizer_hooks
from .backward import BackwardPass
from .optimizer_state import OptimizerState
from .units import AbsentParameter, GatheredUnit, NoSharedMemory, Place, SharedUnit, Unit, WholeUnit

__all__ = ["FSDP"]

call_site.add_library(f"{Path(torch.__file__).parent}/")

Strategy = Literal["full", "grads", "hybrid", "none"]
STRATEGIES = ("full", "grads", "hybrid", "none")
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Containers: only what is in them has a forward."""


class FSDP(nn.Module):  # type: ignore[misc]
    """Wraps a module: every rank runs it on its own data, and keeps only a part of what training it needs.

    ```python
    model = px.parallel.FSDP(model, world)
    optimizer = torch.optim.AdamW(model.parameters())   # this rank's rows of each parameter
    loss = loss_function(model(inputs), targets)
    loss.backward()                                     # gradients are averaged and scattered while it runs
    model.clip_grad_norm_(1.0)
    optimizer.step()
    ```

    `parameters()` are this rank's shards: some rows of each parameter, with the gradients of these rows. The optimizer
    keeps its state for them alone. Forward and backward use whole parameters. **Where all ranks are on one host, these
    exist once, in memory that the ranks share**: each updates its rows in it, and nothing is gathered. Elsewhere a
    layer is gathered just before it is used, and given back after it.

    Args:
        module: On the CPU, the same on all ranks; the values of the first rank are taken, so that the others may have
            it on the `meta` device.
        where: The ranks that train together. Of a mesh with several axes, `hybrid` shards along the last one.
        strategy: What is sharded. `full`: parameters, gradients and the optimizer's state. `grads`: gradients and the
            optimizer's state; every rank has all parameters. `hybrid`: as `full` among the ranks of a host (or of the
            mesh's last axis), and the same across them. `none`: nothing.
        mixed_precision: The dtype of forward and backward, as `torch.bfloat16`. Shards, gradients and their sums stay
            in the module's dtype, and so do buffers and the weights of batch normalisation. Inputs of floating-point
            dtypes are converted.
        prefetch: How many layers are gathered ahead, where they have to be.
        units: The classes of the layers that are gathered and reduced one by one. By default the items of the module's
            outermost lists and sequences.
        timeout: Seconds for each operation; the group's, if not given.

    Raises:
        UsageError: The module cannot be trained so, or the strategy does not fit the ranks.
        Desync: The ranks have different modules; names the parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        where: Group | Mesh,
        *,
        strategy: Strategy = "full",
        mixed_precision: torch.dtype | None = None,
        prefetch: int = 1,
        units: Sequence[type[nn.Module]] | None = None,
        timeout: float | None = None,
    ) -> None:
        super().__init__()
        if strategy not in STRATEGIES:
            raise UsageError(f"strategy={strategy!r} is not valid (expected one of {', '.join(STRATEGIES)})")
        if mixed_precision is not None and not mixed_precision.is_floating_point:
            raise UsageError(f"mixed_precision={mixed_precision} is not valid (expected a floating-point dtype)")
        if not isinstance(prefetch, int) or prefetch < 0:
            raise UsageError(f"prefetch={prefetch!r} is not valid (expected 0 or more layers)")
        if not isinstance(where, (Group, Mesh)):
            raise UsageError(f"where={shown(where)} is not valid (expected a Group or a Mesh)")
        self.module = module
        self.group = where.group if isinstance(where, Mesh) else where
        self.strategy = strategy
        self._compute = mixed_precision
        self._prefetch = prefetch
        self._timeout = timeout
        self._syncs = True
        self._due = False
        """Whether a backward has averaged since forward last saw the shards: then they may have changed."""
        self._stepped = False
        """Whether an optimizer has changed the shards since forward last saw them."""
        self._awaits_backward = False
        """Whether a forward has been made whose backward may come."""
        self._pass: BackwardPass | None = None
        self._may_share = True
        """Whether it is worth trying to have parameters in common memory."""
        self._check(units)
        self._shards, self._replicas = _groups(where, strategy)
        self._units = self._make_units(units)
        self._hook_units()
        self._broadcast_buffers()
        optimizer_hooks.watch(self)

    # -- set up --------------------------------------------------------------------------------------------------------

    def _check(self, units: Sequence[type[nn.Module]] | None) -> None:
        for name, part in self.module.named_modules():
            if isinstance(part, (FSDP, DDP)):
                raise UsageError(f"{name or 'the module'} is wrapped already (expected a module without FSDP and DDP)")
        named = dict(self.module.named_parameters())
        if not any(parameter.requires_grad for parameter in named.values()):
            raise UsageError("the module has no parameters that require gradients")
        for name, parameter in named.items():
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise UsageError(f"parameter {name!r} has no shape yet (call the module once before you wrap it)")
            if parameter.device.type not in ("cpu", "meta") or parameter.layout != torch.strided:
                raise UsageError(
                    f"parameter {name!r} is on {parameter.device} and {parameter.layout} (expected dense, on the CPU)"
                )
            if parameter.is_meta and self.group.rank == 0:
                raise UsageError(f"parameter {name!r} is on the meta device on rank 0, whose values are taken")
            if parameter.requires_grad and not (parameter.is_floating_point() or parameter.is_complex()):
                raise UsageError(f"parameter {name!r} has {parameter.dtype}, which cannot be trained")
        for name, part in self.module.named_modules():
            if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse and part.weight.requires_grad:
                raise UsageError(
                    f"the embedding {name or 'that is wrapped'!r} makes sparse gradients (expected sparse=False)"
                )
        words = {
            name: f"{tuple(parameter.shape)} {parameter.dtype}{'' if parameter.requires_grad else ' frozen'}"
            for name, parameter in named.items()
        }
        kinds = "" if units is None else ", ".join(kind.__qualname__ for kind in units)
        words["the options"] = f"{self.strategy} {self._compute} {self._prefetch} {kinds}"
        replicas.check_alike(words, self.group, "the ranks have different modules", shows=True, timeout=self._timeout)

    def _make_units(self, kinds: Sequence[type[nn.Module]] | None) -> list[Unit]:
        """The layers in the order of forward, then what is left."""
        made: list[Unit] = []
        layers = list(_layers(self.module, None if kinds is None else tuple(kinds)))
        for layer, places in _assigned(self.module, layers):
            alike: dict[tuple[torch.dtype, torch.dtype], list[Place]] = {}
            for place in places:
                alike.setdefault((place.parameter.dtype, self._compute_dtype(place)), []).append(place)
            made += [self._make_unit(some, layer, compute) for (_, compute), some in alike.items()]
        return made

    def _compute_dtype(self, place: Place) -> torch.dtype:
        """The dtype that forward uses. Batch normalisation takes its weights as long as its running statistics."""
        dtype = place.parameter.dtype
        keeps = any(isinstance(owner, nn.modules.batchnorm._BatchNorm) for owner, _ in place.owners)
        return dtype if self._compute is None or keeps or not dtype.is_floating_point else self._compute

    def _broadcast_buffers(self) -> None:
        for owner in self.module.modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    mine = torch.empty(buffer.shape, dtype=buffer.dtype) if buffer.is_meta else buffer
                    self.group.broadcast(mine.data, 0, timeout=self._timeout)
                    owner._buffers[name] = mine

    def _make_unit(self, places: list[Place], layer: nn.Module | None, compute: torch.dtype) -> Unit:
        kind: type[Unit] = WholeUnit if self.strategy in ("grads", "none") or self._shards is None else GatheredUnit
        if kind is GatheredUnit and self._may_share:
            with contextlib.suppress(NoSharedMemory):
                return SharedUnit(places, layer, self._shards, self._replicas, compute=compute, timeout=self._timeout)
            self._may_share = False  # all ranks know that; one warning is enough
        return kind(places, layer, self._shards, self._replicas, compute=compute, timeout=self._timeout)

    def _hook_units(self) -> None:
        for unit in self._units:
            for place in unit.places:
                self._hook_parameter(unit, place)
        gathered = [unit for unit in self._units if isinstance(unit, GatheredUnit) and unit.module is not None]
        for index, unit in enumerate(gathered):
            ahead = gathered[index + 1 : index + 1 + self._prefetch]
            behind = gathered[max(0, index - self._prefetch) : index][::-1]
            assert unit.module is not None
            unit.module.register_forward_pre_hook(_gather_for([unit, *ahead]))
            unit.module.register_forward_hook(_after_forward(unit, behind))

    def _hook_parameter(self, unit: Unit, place: Place) -> None:
        if place.parameter.requires_grad and not place.is_hooked:
            place.is_hooked = True
            place.make_sparse()
            for use in place.uses:
                use.register_post_accumulate_grad_hook(_Fired(self, unit, place))

    def _follow_shards(self) -> None:
        """A shard that the program has frozen or unfrozen says so for the whole parameter, and that for the shard."""
        for unit in self._units:
            for place, shard, _ in unit.named_shards():
                if place.parameter.requires_grad != shard.requires_grad:
                    # One of them is as it was; the program has changed the other.
                    place.trains = not place.trains
                    shard.requires_grad_(place.trains)
                    for use in place.uses:
                        use.requires_grad_(place.trains)
                    self._hook_parameter(unit, place)

    # -- what a training loop calls ------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module."""
        self._refresh()
        self._follow_shards()
        self._gather_rest()
        if self._compute is not None:
            args, kwargs = _converted(args, self._compute), _converted(kwargs, self._compute)
        output = self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            self._awaits_backward = True
            self._watch(output, self._syncs)
        elif not self._awaits_backward:
            self._release_rest()
        return output

    def parameters_changed(self) -> None:
        """Says that the shards were changed by something else than an optimizer of torch. All ranks call it."""
        self._stepped = True

    def before_step(self) -> None:
        """An optimizer is about to change the shards: not before all ranks have computed with them as they were."""
        if self._shards is not None and any(isinstance(unit, SharedUnit) for unit in self._units):
            self._shards.barrier(timeout=self._timeout)

    def _refresh(self) -> None:
        """After a step: the whole parameters are what the shards are now. All ranks come here once after each.

        Without one, an evaluation between backward and step changes nothing. A forward for training comes after a step,
        even if nobody has seen it.
        """
        if not (self._stepped or (self._due and torch.is_grad_enabled())):
            return
        self._due = self._stepped = False
        self._refuse_late_ones()
        for unit in self._units:
            unit.refresh()
        if self._shards is not None:  # nobody computes before all have made their step
            self._shards.barrier(timeout=self._timeout)

    def _refuse_late_ones(self) -> None:
        """Refuses parameters that the module got after it was wrapped: nobody would average or save them."""
        known = {id(use) for unit in self._units for place in unit.places for use in place.uses}
        for name, parameter in self.module.named_parameters():
            if id(parameter) not in known and not isinstance(parameter, AbsentParameter):
                raise UsageError(f"parameter {name!r} was added or replaced after FSDP(...) (do that before)")

    def _watch(self, output: Any, averages: bool) -> None:
        def reached(_grads: Any) -> None:
            if self._pass is None:
                self._gather_rest()
                # A graph of this backward is made, as for a penalty of gradients: another one will need the parameters.
                self._begin(averages, keeps=torch.is_grad_enabled())

        for node in {id(node): node for node in nodes_of(output, set())}.values():
            node.register_prehook(reached)

    def _new_pass(self, averages: bool, keeps: bool = False) -> BackwardPass:
        layers = [unit for unit in self._units if unit.module is not None]
        rest = [unit for unit in self._units if unit.module is None]
        return BackwardPass(
            [*reversed(layers), *rest],
            self.group,
            averages=averages,
            keeps=keeps,
            timeout=self._timeout,
            on_end=self._ended,
        )

    def _begin(self, averages: bool, keeps: bool) -> None:
        self._pass = self._new_pass(averages, keeps)
        torch.autograd.Variable._execution_engine.queue_callback(EndOfBackward(self._pass))

    def fired(self, unit: Unit, parameter: Any) -> None:
        """Backward has completed a gradient."""
        if self._pass is not None:
            self._pass.mark_ready(unit, parameter)

    def _ended(self, averaged: bool, keeps: bool) -> None:
        self._pass = None
        self._due = self._due or averaged
        if not keeps:
            self._awaits_backward = False
            for unit in self._units:
                unit.release()

    def _gather_rest(self) -> None:
        for unit in self._units:
            if unit.module is None:
                unit.gather()

    def _release_rest(self) -> None:
        for unit in self._units:
            if unit.module is None:
                unit.release()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """The backward of a forward inside only adds to this rank's whole gradients; the next one outside averages all.

        As in torch, the forward decides: it has to be inside. Until then each rank has whole gradients.
        """
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def sync_gradients(self) -> None:
        """Averages the whole gradients that `no_sync` has left, and scatters them. All ranks call it.

        Raises:
            As backward.
        """
        self._new_pass(True).finish()

    def fail_sync(self) -> None:
        """Takes part in a `sync_gradients` of the other ranks without any gradients: they raise `Desync`."""
        self._new_pass(True).give_up()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales the gradients of all shards together so that their norm is at most `max_norm`. All ranks call it.

        Args:
            norm_type: The p of the norm, more than 0; infinity for the largest element.

        Returns:
            The norm before, the same on all ranks.

        Raises:
            UsageError: There is no such norm.
        """
        if not norm_type > 0:
            raise UsageError(f"norm_type={norm_type!r} is not valid (expected a number of more than 0, or infinity)")
        gradients = [shard.grad for shard in self.parameters() if shard.grad is not None]
        norms = [torch.linalg.vector_norm(_longest(each), norm_type) for each in gradients]
        mine = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())
        total = mine.double().reshape(1)
        if self._shards is not None:
            if norm_type == float("inf"):
                self._shards.all_reduce(total, op="max", timeout=self._timeout)
            else:
                total = total**norm_type
                self._shards.all_reduce(total, timeout=self._timeout)
                total = total ** (1 / norm_type)
        scale = max_norm / (total + 1e-6)
        if float(scale) < 1:
            for each in gradients:
                each.mul_(scale.to(each.dtype))
        return total[0]

    # -- parameters and state ------------------------------------------------------------------------------------------

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's shards, by the names that the parameters have in the module."""
        lead = f"{prefix}." if prefix else ""
        for unit in self._units:
            for place, shard, _ in unit.named_shards():
                yield f"{lead}{place.name}", shard

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of the shards, and what `no_sync` has left."""
        super().zero_grad(set_to_none)
        for place in (place for unit in self._units for place in unit.places):
            for use in place.uses:
                if set_to_none:
                    use.grad = None
                elif use.grad is not None:
                    use.grad.detach_().zero_()

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Parameters as `px.checkpoint.Shard`, buffers as they are: for `px.checkpoint.save`, which writes each once.

        `full_state_dict` has whole tensors. The arguments are for modules that have this one inside.
        """
        found: dict[str, Any] = {} if destination is None else destination
        for unit in self._units:
            for place, shard, first in unit.named_shards():
                part = self.shard_of(place, shard if keep_vars else shard.detach(), first)
                found.update({f"{prefix}{name}": part for name in place.names})
        found.update({f"{prefix}{name}": buffer for name, buffer in self._buffers_to_keep().items()})
        return found

    def _buffers_to_keep(self) -> dict[str, torch.Tensor]:
        """The buffers that belong to the module's state."""
        found = {}
        for prefix, owner in self.module.named_modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None and name not in owner._non_persistent_buffers_set:
                    found[f"{prefix}.{name}" if prefix else name] = buffer
        return found

    def shard_of(self, place: Place, rows: torch.Tensor, first: int) -> Any:
        """A tensor of the rows of a shard, as a part of one of the parameter's shape."""
        shape = tuple(place.parameter.shape)
        offset = (first, *[0] * (len(shape) - 1)) if shape else ()
        return Shard(rows, shape, offset, axes={0: "shard"}, replicas=self._replicas)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Takes parameters and buffers: shards as `state_dict` gives them, or whole tensors. All ranks call it.

        Raises:
            UsageError: Something is missing, unknown, or of another shape.
        """
        buffers = self._buffers_to_keep()
        places = [each for unit in self._units for each in unit.named_shards()]
        named = {name: (place, shard, first) for place, shard, first in places for name in place.names}
        # Of a parameter with several names, one is enough.
        missing = sorted(place.name for place, _, _ in places if not {*place.names} & {*state_dict})
        missing += sorted({*buffers} - {*state_dict})
        unknown = sorted({*state_dict} - {*named, *buffers})
        if strict and (missing or unknown):
            words = [f"it has no {name}" for name in missing[:1]] + [f"{name} is not known" for name in unknown[:1]]
            raise UsageError(f"the state does not fit the module: {', '.join(words)}")
        found: list[tuple[torch.Tensor, torch.Tensor]] = []  # all of it is looked at before anything is changed
        for name, value in state_dict.items():
            if name in named:
                place, shard, first = named[name]
                found.append((shard, rows_for(tuple(place.parameter.shape), shard, first, value, name)))
            elif name in buffers:
                tensor = torch.as_tensor(value)
                if tensor.shape != buffers[name].shape:
                    raise _misfit(name, tensor.shape, buffers[name].shape)
                found.append((buffers[name], tensor))
        with torch.no_grad():
            for mine, new in found:
                mine.copy_(new)
        self._stepped = True
        return nn.modules.module._IncompatibleKeys(missing, unknown)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Whole parameters and buffers in memory of this rank. All ranks call it."""
        self._refresh()
        found: dict[str, torch.Tensor] = {}
        for unit in self._units:
            part = torch.zeros(unit.layout.length, dtype=unit.dtype)
            for view, shard in zip(unit.layout.views(part, unit.rank), unit.shards, strict=True):
                view.copy_(shard.detach())
            whole = [torch.empty(place.parameter.shape, dtype=unit.dtype) for place in unit.places]
            everyone = part if unit.group is None else unit.group.all_gather(part, timeout=self._timeout)
            unit.layout.unpack(everyone, whole)
            for place, tensor in zip(unit.places, whole, strict=True):
                found.update(dict.fromkeys(place.names, tensor))
        found.update({name: buffer.detach().clone() for name, buffer in self._buffers_to_keep().items()})
        return found

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> OptimizerState:
        """The state of an optimizer of these parameters, for `px.checkpoint`: saved and loaded by any number of ranks.

        ```python
        tree = {"model": model, "optimizer": model.optimizer_state(optimizer)}
        px.checkpoint.save("step-100", tree, world)
        ```
        """
        places = {
            id(shard): (place.name, first, lambda rows, place=place, first=first: self.shard_of(place, rows, first))
            for unit in self._units
            for place, shard, first in unit.named_shards()
        }
        return OptimizerState(optimizer, places)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> NoReturn:
        raise UsageError("a wrapped module cannot be moved or converted (do that before FSDP(...))")

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise UsageError("an FSDP cannot be pickled or copied (save it by px.checkpoint, or its full_state_dict())")

    def extra_repr(self) -> str:
        kinds = {type(unit).__name__.removesuffix("Unit").lower() for unit in self._units}
        return f"strategy={self.strategy}, {len(self._units)} units ({', '.join(sorted(kinds))})"


class _Fired:
    """A hook of a parameter, called when its gradient is complete."""

    def __init__(self, wrapper: FSDP, unit: Unit, place: Place) -> None:
        # The parameter has this hook, where no collector of garbage looks: it must not hold what holds the parameter.
        self._wrapper = weakref.ref(wrapper)
        self._unit = weakref.ref(unit)
        self._place = weakref.ref(place)

    def __call__(self, parameter: nn.Parameter) -> None:
        wrapper, unit, place = self._wrapper(), self._unit(), self._place()
        if wrapper is not None and unit is not None and place is not None:
            place.collect(parameter)
            wrapper.fired(unit, parameter)


def rows_for(shape: tuple[int, ...], shard: torch.Tensor, first: int, value: Any, name: str) -> torch.Tensor:
    """The rows of a shard out of a whole tensor, or of a shard that has just these.

    Args:
        shape: Of the whole parameter.

    Raises:
        UsageError: It has another shape, or other rows.
    """
    tensor = value.array if isinstance(value, Shard) else torch.as_tensor(value)
    of_whole = tuple(value.shape) if isinstance(value, Shard) else tuple(tensor.shape)
    if of_whole != shape:
        raise _misfit(name, of_whole, shape)
    if not isinstance(value, Shard):
        return (tensor if shape else tensor.view(1))[first : first + shard.shape[0]]
    if tensor.shape != shard.shape or (shape and value.offset[0] != first):
        raise UsageError(
            f"{name} has the rows of another rank, or of another number of ranks (px.checkpoint loads them; or give "
            "the whole tensor)"
        )
    return tensor


def _misfit(name: str, found: Sequence[int], expected: Sequence[int]) -> UsageError:
    return UsageError(f"{name} has shape {tuple(found)} (expected {tuple(expected)})")


def _longest(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to(torch.complex128 if gradient.is_complex() else torch.float64)


def _groups(where: Group | Mesh, strategy: str) -> tuple[Group | None, Group | None]:
    """The ranks that share the rows, and those that have the same; None where there are no others."""
    group = where.group if isinstance(where, Mesh) else where
    if strategy == "none":
        return None, _others(group)
    if strategy != "hybrid":
        return _others(group), None
    mesh = where
    if not isinstance(mesh, Mesh):
        local = group.local_world_size
        everyone = group.all_gather_object(local)
        if len(set(everyone)) > 1:
            raise UsageError(
                f"strategy='hybrid' needs as many ranks on each host (there are {', '.join(map(str, everyone))}; give "
                "a mesh instead)"
            )
        mesh = Mesh(group, {"replica": -1, "shard": local})
    *outer, inner = mesh.axes
    if not outer:
        return _others(mesh[inner]), None
    return _others(mesh[inner]), _others(mesh.flatten(*outer, name="replicas")["replicas"])


def _others(group: Group) -> Group | None:
    return group if group.world_size > 1 else None


def _layers(module: nn.Module, kinds: tuple[type[nn.Module], ...] | None) -> Iterator[nn.Module]:
    """The outermost layers that are units of their own, in the order in which they are registered."""
    for child in module.children():
        is_unit = isinstance(child, kinds) if kinds is not None else isinstance(module, (nn.ModuleList, nn.Sequential))
        if isinstance(child, _NEVER_CALLED):  # nobody would gather it
            is_unit = False
        if is_unit and next(child.parameters(), None) is not None:
            yield child
        else:
            yield from _layers(child, kinds)


def _assigned(module: nn.Module, layers: Sequence[nn.Module]) -> list[tuple[nn.Module | None, list[Place]]]:
    """The parameters of each layer, and of none. One that several have belongs to none: it must be there for all."""
    places: dict[int, Place] = {}
    users: dict[int, set[int | None]] = {}
    inside = {id(part): id(layer) for layer in layers for part in layer.modules()}
    for prefix, owner in module.named_modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                full = f"{prefix}.{name}" if prefix else name
                place = places.setdefault(id(parameter), Place(full, parameter))
                place.owners.append((owner, name))
                if full not in place.names:
                    place.names.append(full)
                users.setdefault(id(parameter), set()).add(inside.get(id(owner)))
    of_layer: dict[int | None, list[Place]] = {}
    for key, place in places.items():
        (user, *others) = users[key]
        of_layer.setdefault(None if others else user, []).append(place)
    found: list[tuple[nn.Module | None, list[Place]]] = [
        (layer, of_layer[id(layer)]) for layer in layers if id(layer) in of_layer
    ]
    return [*found, (None, of_layer[None])] if None in of_layer else found


def _gather_for(units: Sequence[Unit]) -> Callable[..., None]:
    first, *ahead = units

    @not_inlined
    def hook(_module: nn.Module, _inputs: Any) -> None:
        first.prefetch()
        for unit in ahead:
            unit.prefetch()
        first.gather()

    return hook


def _after_forward(unit: Unit, behind: Sequence[Unit]) -> Callable[..., None]:
    back = _gather_for([unit, *behind])

    @not_inlined
    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        unit.release()
        if torch.is_grad_enabled():
            for node in {id(node): node for node in nodes_of(output, set())}.values():
                node.register_prehook(lambda _grads: back(_module, None))

    return hook


def _converted(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _converted(item, dtype) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_converted(item, dtype) for item in value)
    return value
