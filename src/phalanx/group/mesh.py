"""A mesh: the ranks of a group as a grid with named axes, and a group for each line through it."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from ..arguments import as_index, shown
from ..errors import Closed, UsageError
from ..frames import hides_frames
from .group import Group

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Mesh"]


class Mesh:
    """The ranks of a group as a grid. Each axis has a name, and is a group: the line through this rank.

    ```python
    mesh = px.Mesh(world, {"replica": 2, "shard": 4})
    mesh["shard"].all_gather(x)          # among the 4 ranks of this replica
    mesh["replica"].all_reduce(gradient) # among the 2 ranks that hold this shard
    mesh.flatten("replica", "shard")     # a mesh of one axis, "replica_shard", of all 8
    ```

    Neighbours on the last axis are on one host where that is possible: ranks are numbered host by host, whatever order
    the launcher gave them. Every rank of the group makes the mesh, and with the same arguments; nothing is sent. The
    group of an axis is made when it is first asked for, by its members alone. It stays the mesh's, which closes it.

    Args:
        group: The ranks. They stay usable as before.
        shape: The length of each axis by name. One may be -1: as long as the others allow.
        ranks: The group's rank at each place, in the shape of the mesh, for a placement of your own.

    Raises:
        UsageError: The lengths do not multiply to the size of the group, or `ranks` is not each rank once.
    """

    def __init__(self, group: Group, shape: Mapping[str, int], *, ranks: npt.ArrayLike | None = None) -> None:
        if not isinstance(group, Group):
            raise UsageError(f"group={shown(group)} is not valid (expected a Group)")
        lengths = _lengths(shape, group.world_size)
        self._grid = _Grid(group, tuple(lengths), _placed(group, tuple(lengths.values()), ranks))
        self._axes: dict[str, tuple[int, ...]] = {name: (index,) for index, name in enumerate(lengths)}

    @classmethod
    def _view(cls, grid: _Grid, axes: dict[str, tuple[int, ...]]) -> Mesh:
        made = cls.__new__(cls)
        made._grid, made._axes = grid, axes
        return made

    def __repr__(self) -> str:
        shape = " by ".join(f"{name} {length}" for name, length in self.shape.items())
        place = ", ".join(f"{name} {index}" for name, index in self.coordinate.items())
        return f"<Mesh {shape}, here {place}>"

    # -- who -----------------------------------------------------------------------------------------------------------

    @property
    def group(self) -> Group:
        """The group that the mesh was made of. A part of a mesh has that of the whole."""
        return self._grid.group

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes, in order."""
        return tuple(self._axes)

    @property
    def shape(self) -> Mapping[str, int]:
        """The length of each axis."""
        lengths = self._grid.ranks.shape
        return MappingProxyType({name: math.prod(lengths[i] for i in parts) for name, parts in self._axes.items()})

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.shape.values())

    @property
    def coordinate(self) -> Mapping[str, int]:
        """The place of this rank on each axis."""
        grid = self._grid
        return MappingProxyType(
            {
                name: int(np.ravel_multi_index([grid.place[i] for i in parts], [grid.ranks.shape[i] for i in parts]))
                for name, parts in self._axes.items()
            }
        )

    @property
    def ranks(self) -> npt.NDArray[np.int64]:
        """The ranks of `group`, each at its place. Of a part of a mesh: those of the part that this rank is in."""
        return self._grid.line([i for parts in self._axes.values() for i in parts]).reshape(tuple(self.shape.values()))

    def __contains__(self, axis: object) -> bool:
        return axis in self._axes

    def __iter__(self) -> Iterator[str]:
        return iter(self._axes)

    def __len__(self) -> int:
        return len(self._axes)

    # -- groups and parts ----------------------------------------------------------------------------------------------

    @overload
    def __getitem__(self, axis: str) -> Group: ...
    @overload
    def __getitem__(self, axis: tuple[str, ...]) -> Mesh: ...
    @hides_frames
    def __getitem__(self, axis: str | tuple[str, ...]) -> Group | Mesh:
        """The group of an axis; of several, the mesh of these axes alone, in this order.

        Raises:
            UsageError: There is no such axis, or one is named twice.
            Closed: The mesh or its group was closed.
        """
        if isinstance(axis, str):
            return self._grid.group_of(self._parts(axis))
        if not isinstance(axis, tuple) or not axis:
            raise UsageError(f"mesh[{shown(axis)}] is not an axis (expected a name or several, as {self._names()})")
        self._refuse_twice(axis)
        return Mesh._view(self._grid, {name: self._parts(name) for name in axis})

    @hides_frames
    def flatten(self, *axes: str, name: str | None = None) -> Mesh:
        """The mesh with some of its axes as one, at the place of the first. Without arguments: all of them.

        Args:
            axes: The last one is that of the neighbours.
            name: Of the new axis. By default the names, joined by `_`.

        Raises:
            UsageError: There is no such axis, one is named twice, or the name is taken.
        """
        chosen = axes or self.axes
        self._refuse_twice(chosen)
        parts = tuple(index for axis in chosen for index in self._parts(axis))
        called = "_".join(chosen) if name is None else name
        made: dict[str, tuple[int, ...]] = {}
        for axis, of_axis in self._axes.items():
            if axis == chosen[0]:
                made[called] = parts
            elif axis not in chosen:
                made[axis] = of_axis
        if len(made) != len(self._axes) - len(chosen) + 1 or not isinstance(called, str) or not called:
            raise UsageError(f"name={called!r} is not valid (expected a new name beside {', '.join(map(str, made))})")
        return Mesh._view(self._grid, made)

    def _parts(self, axis: str) -> tuple[int, ...]:
        found = self._axes.get(axis)
        if found is None:
            raise UsageError(f"the mesh has no axis {axis!r} (it has {self._names()})")
        return found

    def _refuse_twice(self, axes: Sequence[str]) -> None:
        if len(set(axes)) != len(axes):
            raise UsageError(f"an axis is named twice in {', '.join(map(repr, axes))}")

    def _names(self) -> str:
        return ", ".join(map(repr, self._axes))

    # -- torch ---------------------------------------------------------------------------------------------------------

    @hides_frames
    def to_torch(self, device_type: str = "cpu") -> Any:
        """The same grid as torch's `DeviceMesh`, with process groups of its own. Every rank of the group calls it.

        Raises:
            UsageError: torch.distributed has no process group, or its ranks are not those of the world.
        """
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh

        if not dist.is_initialized():
            raise UsageError('torch.distributed has no process group (call init_process_group("phalanx") first)')
        members = np.asarray(self.group.members)
        if dist.get_world_size() <= int(members.max()) or dist.get_rank() != members[self.group.rank]:
            raise UsageError(
                f"torch.distributed has rank {dist.get_rank()} of {dist.get_world_size()} here, the group has world "
                f"rank {members[self.group.rank]} (expected the same ranks in both)"
            )
        # torch makes the groups of all lines at once, on all ranks: it needs the whole grid, also for a part of one.
        whole = DeviceMesh(device_type, members[self._grid.ranks].tolist(), mesh_dim_names=self._grid.names)
        if tuple(self._axes.values()) == tuple((i,) for i in range(self._grid.ranks.ndim)):
            return whole
        if any(len(parts) > 1 for parts in self._axes.values()):
            raise UsageError("a flattened mesh has no counterpart in torch (call to_torch before flatten)")
        names = tuple(self._grid.names[parts[0]] for parts in self._axes.values())
        try:
            return whole[names if len(names) > 1 else names[0]]
        except KeyError:
            raise UsageError(
                f"torch takes the axes of a mesh in their order only, and not {', '.join(names)} (call to_torch before "
                "you choose them)"
            ) from None

    @classmethod
    @hides_frames
    def from_torch(cls, device_mesh: Any, group: Group | None = None) -> Mesh:
        """The same grid as a `DeviceMesh` of torch. Every rank of it calls this.

        Args:
            device_mesh: Axes without names are called `axis0`, `axis1`, ...
            group: Ranks as in torch's world. By default those of `init_process_group("phalanx")`.

        Raises:
            UsageError: torch's process group is not on Phalanx and no group was given, or a rank of the mesh is not in
                the group.
            InvalidRank: This rank is not in the mesh.
        """
        world = _group_of_torch() if group is None else group
        ranks = np.asarray(device_mesh.mesh)
        names = device_mesh.mesh_dim_names or tuple(f"axis{index}" for index in range(ranks.ndim))
        place = {rank: index for index, rank in enumerate(world.members)}
        wrong = [int(rank) for rank in ranks.flat if rank not in place]
        if wrong:
            raise UsageError(f"rank {wrong[0]} of the DeviceMesh is not in {world!r}")
        local = np.vectorize(place.__getitem__, otypes=[np.int64])(ranks)
        members = sorted(local.ravel().tolist())
        if len(members) < world.world_size:
            world = world.subgroup(members)
            local = np.searchsorted(members, local)
        return cls(world, dict(zip(names, ranks.shape, strict=True)), ranks=local)

    # -- the end -------------------------------------------------------------------------------------------------------

    @hides_frames
    def close(self) -> None:
        """Closes the groups of the axes, of all parts of this mesh too. The group that it was made of stays open."""
        self._grid.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Grid:
    """A whole mesh, which its parts share: who is where, and the groups that were made so far."""

    def __init__(self, group: Group, names: tuple[str, ...], ranks: npt.NDArray[np.int64]) -> None:
        self.group = group
        self.names = names
        self.ranks = ranks
        self.place = tuple(int(index[0]) for index in np.nonzero(ranks == group.rank))
        # Ranks may ask for their groups in different orders: groups are told apart by the mesh and by their axes.
        self._identity = group._backend.next_context(f"mesh {' '.join(names)}", (*ranks.shape, *ranks.ravel().tolist()))
        self._groups: dict[tuple[int, ...], Group] = {}
        self._lock = threading.Lock()
        self._closed = False

    def line(self, axes: Sequence[int]) -> npt.NDArray[np.int64]:
        """The ranks that differ from this one on these axes only, the last axis varying first."""
        rest = [axis for axis in range(self.ranks.ndim) if axis not in axes]
        found: npt.NDArray[np.int64] = self.ranks.transpose([*rest, *axes])[tuple(self.place[axis] for axis in rest)]
        return found.ravel()

    def group_of(self, axes: tuple[int, ...]) -> Group:
        with self._lock:
            if self._closed:
                raise Closed("the mesh was closed")
            if axes not in self._groups:
                label = f"axis {' '.join(map(str, axes))} of {self._identity.hex()}"
                self._groups[axes] = self.group._labelled_subgroup(self.line(axes).tolist(), label)
            return self._groups[axes]

    def close(self) -> None:
        with self._lock:
            self._closed = True
            groups, self._groups = list(self._groups.values()), {}
        for group in groups:
            group.close()


def _lengths(shape: Mapping[str, int], size: int) -> dict[str, int]:
    if not isinstance(shape, Mapping) or not shape:
        raise UsageError(f'shape={shown(shape)} is not valid (expected a length for each axis, as {{"shard": {size}}})')
    lengths: dict[str, int] = {}
    for name, given in shape.items():
        if not isinstance(name, str) or not name:
            raise UsageError(f"{shown(name)} is not the name of an axis (expected a str)")
        length = as_index(given, name, "a length")
        if length < 1 and length != -1:
            raise UsageError(f"the axis {name!r} has length {length} (expected 1 or more, or -1 for what is left)")
        lengths[name] = length
    open_axes = [name for name, length in lengths.items() if length == -1]
    known = math.prod(length for length in lengths.values() if length != -1)
    if len(open_axes) == 1 and size % known == 0:
        lengths[open_axes[0]] = size // known
    elif open_axes or known != size:
        words = " by ".join(f"{name} {length}" for name, length in lengths.items())
        raise UsageError(f"a mesh of {words} does not fit a group of {size} ranks")
    return lengths


def _placed(group: Group, lengths: tuple[int, ...], given: npt.ArrayLike | None) -> npt.NDArray[np.int64]:
    if given is not None:
        ranks = np.asarray(given)
        if ranks.shape != lengths or sorted(ranks.ravel().tolist()) != list(range(group.world_size)):
            raise UsageError(
                f"ranks= of shape {ranks.shape} is not valid (expected each rank below {group.world_size} once, in "
                f"shape {lengths})"
            )
        return ranks.astype(np.int64)
    hosts = group._backend.host_ids
    first = {host: hosts.index(host) for host in hosts}
    return np.asarray(sorted(range(group.world_size), key=lambda rank: (first[hosts[rank]], rank))).reshape(lengths)


def _group_of_torch() -> Group:
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        raise UsageError("torch.distributed has no process group (initialise it, or give a group)")
    world: Any = dist.group.WORLD
    found = getattr(world._get_backend(torch.device("cpu")), "group", None)
    if not isinstance(found, Group):
        raise UsageError(f"torch's process group is on {dist.get_backend()!r} (expected 'phalanx', or give a group)")
    return found
