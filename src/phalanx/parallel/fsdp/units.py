"""A unit: the parameters of one layer, which are sharded, gathered and reduced together.

Every parameter exists twice as an object: the module's own, with all of its rows, which forward and backward use; and
this rank's shard, some of its rows, which the optimizer has. The kinds of units differ in where these lie:

- `SharedUnit`: both in memory that all ranks of the host have in common. Nothing is gathered.
- `GatheredUnit`: shards in this rank's memory; the whole exists only while it is needed.
- `WholeUnit`: the whole in this rank's memory, the shard is a view of it. Shards are gathered after a step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ...errors import UsageError
from ...group import Group, Work
from .averaging import Averaging, large_ones
from .host_memory import share_memory
from .layout import Layout

__all__ = ["AbsentParameter", "GatheredUnit", "Place", "SharedUnit", "Unit", "WholeUnit"]


class Place:
    """A parameter and all modules that have it, under which names.

    Where several modules have it, each gets a parameter of its own, in the same memory: a use. Autograd would hold a
    whole gradient of each use and then their sum, so that there are three for a moment, and two until then. So the
    gradient of a use is added to the first one's in place, as soon as it is there; and that of an embedding is sparse.
    """

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.name = name
        self.names = [name]
        """All names that it has in the module."""
        self.original = weakref.ref(parameter)
        """The parameter that the module had before it was wrapped, if anybody still has it."""
        self.parameter = parameter
        """That of the first module. It gets the whole gradient."""
        self.uses = [parameter]
        """Those of all modules."""
        self.owners: list[tuple[nn.Module, str]] = []
        self.is_hooked = False
        self._absent: AbsentParameter | None = None
        self.trains = parameter.requires_grad
        """Whether it was trained when last looked at."""

    def hide(self) -> None:
        """Puts something in the module's place that says where the parameter is: its memory is given back."""
        if self._absent is None or self._absent.requires_grad != self.parameter.requires_grad:
            self._absent = AbsentParameter.of(self)
        for module, name in self.owners:
            module._parameters[name] = self._absent

    def show(self) -> None:
        """Gives the module its parameter again."""
        for (module, name), use in zip(self.owners, self.uses, strict=True):
            module._parameters[name] = use

    def put(self, tensor: torch.Tensor) -> None:
        """Makes this tensor the module's parameter, in all places."""
        needs_grad = self.parameter.requires_grad
        self.uses = [nn.Parameter(tensor, requires_grad=needs_grad) for _ in self.owners]
        self.parameter = self.uses[0]
        for (module, name), use in zip(self.owners, self.uses, strict=True):
            module._parameters[name] = use

    def make_sparse(self) -> None:
        """Has embeddings make sparse gradients, if another module makes a dense one to add them to."""
        for (module, _), use in zip(self.owners, self.uses, strict=True):
            if len(self.uses) > 1 and _may_be_sparse(module):
                module.sparse = True
                use.register_hook(_coalesced)

    def collect(self, use: nn.Parameter) -> None:
        """Adds the gradient of a use to that of the parameter."""
        if use is self.parameter:
            return
        gradient, use.grad = use.grad, None
        whole = self.parameter.grad
        if whole is None or gradient is None:
            self.parameter.grad = gradient if whole is None else whole
        elif whole.is_sparse and not gradient.is_sparse:
            self.parameter.grad = gradient.add_(whole)
        else:
            whole.add_(gradient)


class AbsentParameter(nn.Parameter):  # type: ignore[misc]
    """Stands for a parameter whose memory is given back. Torch would read what is not there, and crash."""

    place_name: str

    @classmethod
    def of(cls, place: Place) -> AbsentParameter:
        """A stand-in for the parameter of a place: it has its shape and dtype, and nothing else."""
        whole = place.parameter
        made: AbsentParameter = torch.empty(whole.shape, dtype=whole.dtype, device="meta").as_subclass(cls)
        made.requires_grad_(whole.requires_grad)
        made.place_name = place.name
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OF_NO_VALUE or not any(hasattr(each, "place_name") for each in args if isinstance(each, cls)):
            return super().__torch_function__(func, types, args, kwargs or {})
        name = next(each.place_name for each in args if isinstance(each, cls))
        raise UsageError(
            f"parameter {name!r} is not there: an FSDP gathers it while its layer runs (call the layer; the FSDP has "
            "its rows in parameters(), and the whole in full_state_dict())"
        )


_OF_NO_VALUE = {
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("shape", "dtype", "device", "layout", "requires_grad", "is_leaf")
    ),
    *(getattr(torch.Tensor, name).__get__ for name in ("grad", "is_meta", "ndim", "itemsize", "nbytes")),
    *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.is_floating_point, torch.Tensor.is_complex),
}
"""Questions that a parameter answers that is not there."""


def _may_be_sparse(module: nn.Module) -> bool:
    return type(module) is nn.Embedding and module.max_norm is None and not module.scale_grad_by_freq


def _coalesced(gradient: torch.Tensor) -> torch.Tensor:
    """The rows of a word that comes twice are added to each other first, as in a dense gradient: for the same bits."""
    return gradient.coalesce() if gradient.is_sparse else gradient


class Unit:
    """The parameters of a layer, of one dtype.

    Args:
        places: The parameters.
        module: The layer whose forward needs them; None for those of the whole module.
        shards: The ranks that share the rows.
        replicas: The ranks that have the same rows; None if there are no others.
        compute: The dtype that forward and backward use.
        timeout: Seconds for each operation.
    """

    def __init__(
        self,
        places: Sequence[Place],
        module: nn.Module | None,
        shards: Group | None,
        replicas: Group | None,
        *,
        compute: torch.dtype,
        timeout: float | None,
    ) -> None:
        self.places = list(places)
        self.module = module
        self.group = shards
        self.replicas = replicas
        self.dtype = places[0].parameter.dtype
        self.compute = compute
        self.timeout = timeout
        self.rank = 0 if shards is None else shards.rank
        self.ranks = 1 if shards is None else shards.world_size
        shapes = [place.parameter.shape for place in places]
        self.layout = Layout(shapes, self.ranks, large_ones(shapes, self.ranks, self.dtype))
        self.size = sum(shape.numel() for shape in shapes) * self.dtype.itemsize
        """Bytes of its whole parameters."""
        self.shards: list[nn.Parameter] = []
        self._averaging: Averaging | None = None
        self.has_gradients = [False] * len(places)
        """Of which parameters this rank has given a gradient to the average."""
        self._is_averaged = False
        self._set_up()

    def _set_up(self) -> None:
        raise NotImplementedError

    def _make_shards(self, rows: Sequence[torch.Tensor]) -> None:
        self.shards = [
            nn.Parameter(tensor, requires_grad=place.parameter.requires_grad)
            for tensor, place in zip(rows, self.places, strict=True)
        ]

    # -- values --------------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Makes what forward uses of the shards as they are now. All ranks call it."""

    def gather(self) -> None:
        """Waits until the whole parameters are there."""

    def prefetch(self) -> None:
        """Begins to gather the whole parameters."""

    def release(self) -> None:
        """Gives the memory of the whole parameters back, where it is not shared."""

    # -- gradients -----------------------------------------------------------------------------------------------------

    def reduce(self, *, only_zeros: bool = False) -> None:
        """Begins to average the gradients. They are taken from the module's parameters."""
        if not any(place.parameter.requires_grad for place in self.places):
            return
        gradients = [None if only_zeros else _dense(place.parameter.grad) for place in self.places]
        self.has_gradients = [gradient is not None for gradient in gradients]
        for place in self.places:
            if not only_zeros:
                place.parameter.grad = None
        self._averaging = Averaging(
            gradients, self.layout, self.group, self.replicas, dtype=self.dtype, timeout=self.timeout
        )
        self._is_averaged = False

    def wait(self) -> None:
        """Waits for the average over the shards' ranks, and makes that over the replicas."""
        if self._averaging is not None and not self._is_averaged:
            self._averaging.wait()
            self._is_averaged = True

    def give_out(self, used: Sequence[bool]) -> None:
        """Adds the average to the gradients of the shards.

        Args:
            used: The parameters of which any rank had a gradient. The others get none, as in one process: an optimizer
                leaves them alone, which it would not if they had one of zeros.
        """
        if self._averaging is None:
            return
        rows, self._averaging = self._averaging.rows(), None
        for shard, gradient, has_any in zip(self.shards, rows, used, strict=True):
            if shard.requires_grad and has_any:
                shard.grad = gradient if shard.grad is None else shard.grad.add_(gradient)

    def drop(self) -> None:
        """Forgets the average."""
        self._averaging = None

    # -- state ---------------------------------------------------------------------------------------------------------

    def named_shards(self) -> Iterator[tuple[Place, nn.Parameter, int]]:
        """Each parameter, this rank's shard of it, and its first row."""
        for index, (place, shard) in enumerate(zip(self.places, self.shards, strict=True)):
            yield place, shard, self.layout.rows(index, self.rank)[0]

    def _first_values(self) -> list[torch.Tensor]:
        """The values of the first rank on all ranks, one after the other: this rank's own are freed."""
        values = []
        for place in self.places:
            parameter = place.parameter.detach()
            mine = torch.empty(parameter.shape, dtype=self.dtype) if parameter.is_meta else parameter.contiguous()
            for group in (self.replicas, self.group):
                if group is not None:
                    group.broadcast(mine, 0, timeout=self.timeout)
            values.append(mine)
        return values


class SharedUnit(Unit):
    """Parameters that exist once on the host. Every rank computes on the same memory and updates its own rows in it.

    If forward uses a shorter dtype, the shared memory holds that, and the shards are this rank's own.
    """

    def _set_up(self) -> None:
        assert self.group is not None
        whole = self._map()
        if self.group.rank == 0:
            for place, tensor in zip(self.places, whole, strict=True):
                value = place.parameter.detach()
                if self.replicas is not None:
                    value = value.contiguous()
                    self.replicas.broadcast(value, 0, timeout=self.timeout)
                tensor.copy_(value)
        self.group.barrier(timeout=self.timeout)
        rows = self.layout.rows_of(whole, self.rank)
        if self.compute != self.dtype:
            # The whole was rounded; shards begin with the values of the first rank as they were.
            exact = self._first_values()
            rows = [row.clone() for row in self.layout.rows_of(exact, self.rank)]
        self._make_shards(rows)
        for place, tensor in zip(self.places, whole, strict=True):
            place.put(tensor)

    def _map(self) -> list[torch.Tensor]:
        """The whole parameters, in the memory of all."""
        assert self.group is not None
        sizes = [-(-place.parameter.numel() * self.compute.itemsize // 64) * 64 for place in self.places]
        memory = share_memory(self.group, max(sum(sizes), 64), self.timeout)
        if memory is None:
            raise NoSharedMemory
        found, start = [], 0
        for place, size in zip(self.places, sizes, strict=True):
            count = place.parameter.numel() * self.compute.itemsize
            flat = torch.from_numpy(memory[start : start + count]).view(self.compute)
            found.append(flat.view(place.parameter.shape))
            start += size
        return found

    def refresh(self) -> None:
        if self.compute != self.dtype:
            whole = [place.parameter.data for place in self.places]
            for row, shard in zip(self.layout.rows_of(whole, self.rank), self.shards, strict=True):
                row.copy_(shard.detach())


def _dense(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


class NoSharedMemory(Exception):
    """The ranks have no memory in common."""


class GatheredUnit(Unit):
    """Parameters whose whole exists only from before it is used until after it."""

    def _set_up(self) -> None:
        self._work: Work[Any] | None = None
        exact = self._first_values()
        self._part = torch.zeros(self.layout.length, dtype=self.dtype)
        rows = self.layout.views(self._part, self.rank)
        for row, value in zip(rows, self.layout.rows_of(exact, self.rank), strict=True):
            row.copy_(value)
        del exact
        self._make_shards(rows)
        sizes = [place.parameter.numel() for place in self.places]
        self._flat = torch.empty(sum(sizes), dtype=self.compute)
        self._bytes = self._flat.untyped_storage().size()
        for place, flat in zip(self.places, self._flat.split(sizes), strict=True):
            place.put(flat.view(place.parameter.shape))
        self._is_there = True
        self.release()

    def prefetch(self) -> None:
        if not self._is_there and self._work is None:
            part = self._part.to(self.compute)
            if self.group is None:
                self._fill(part)
            else:
                self._work = self.group.all_gather(part, async_op=True, timeout=self.timeout)

    def gather(self) -> None:
        self.prefetch()
        if self._work is not None:
            work, self._work = self._work, None
            self._fill(work.wait())

    def _fill(self, parts: torch.Tensor) -> None:
        self._flat.untyped_storage().resize_(self._bytes)
        # Autograd may have kept views of these tensors for backward. They get the values that they had.
        self.layout.unpack(parts, [place.parameter.data for place in self.places])
        for place in self.places:
            place.show()
        self._is_there = True

    def release(self) -> None:
        if self._is_there:
            self._is_there = False
            for place in self.places:
                place.hide()
            self._flat.untyped_storage().resize_(0)

    def refresh(self) -> None:
        """Drops what was gathered before the step, also ahead of its time."""
        if self._work is not None:
            work, self._work = self._work, None
            work.wait()
        self.release()


class WholeUnit(Unit):
    """Parameters that every rank has. Each updates its own rows, which the others then get."""

    def _set_up(self) -> None:
        exact = self._first_values()
        whole = [value.to(self.compute).clone() if self.compute != self.dtype else value for value in exact]
        rows = self.layout.rows_of(exact, self.rank)
        if self.compute != self.dtype:
            rows = [row.clone() for row in rows]
        self._make_shards(rows)
        for place, tensor in zip(self.places, whole, strict=True):
            place.put(tensor)

    def refresh(self) -> None:
        whole = [place.parameter.data for place in self.places]
        if self.compute != self.dtype:
            for row, shard in zip(self.layout.rows_of(whole, self.rank), self.shards, strict=True):
                row.copy_(shard.detach())
        if self.group is None:
            return
        part = torch.zeros(self.layout.length, dtype=self.compute)
        for view, row in zip(self.layout.views(part, self.rank), self.layout.rows_of(whole, self.rank), strict=True):
            view.copy_(row)
        self.layout.unpack(self.group.all_gather(part, timeout=self.timeout), whole)
