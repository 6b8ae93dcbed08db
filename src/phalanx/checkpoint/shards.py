"""Parts of tensors that programs say they hold, and values that each rank has for itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..arguments import as_index, as_shape, shown
from ..errors import UsageError
from ..group import Group, Mesh
from .regions import Region

__all__ = ["PerRank", "Shard", "part_of_axis"]


class Shard:
    """A part of a tensor: the one that this rank holds. All others in a tree are taken to be the same on all ranks.

    ```python
    tree = {"weight": px.checkpoint.Shard(mine, shape=(1000, 64), offset=(250 * rank, 0))}
    tree = {"weight": px.checkpoint.Shard.along(mine, mesh["shard"], axis="shard")}
    ```

    Args:
        array: The part: of NumPy, torch or JAX.
        shape: Of the whole tensor.
        offset: The place of the part's first element.
        axes: The axis of a mesh that each dim was cut along, for `load(mesh=...)`.
        replicas: The ranks that hold the same part. Only the first of them writes it.

    Raises:
        UsageError: The part does not lie inside the shape.
    """

    def __init__(
        self,
        array: Any,
        shape: Sequence[int],
        offset: Sequence[int],
        *,
        axes: Mapping[int, str] | None = None,
        replicas: Group | None = None,
    ) -> None:
        self.array = array
        self.shape = as_shape(shape, 1)
        self.offset = as_shape(offset, 1)
        self.axes = dict(axes or {})
        self.replicas = replicas
        if not self.region.within(self.shape):
            raise UsageError(
                f"a part of shape {tuple(array.shape)} at {self.offset} does not lie in a tensor of shape {self.shape}"
            )

    @classmethod
    def along(
        cls,
        array: Any,
        group: Group,
        dim: int = 0,
        *,
        axis: str | None = None,
        replicas: Group | None = None,
        timeout: float | None = None,
    ) -> Shard:
        """The parts of all ranks of a group, one behind the other along a dim. All of them call it.

        Raises:
            UsageError: The array does not have the dim.
            As `Group.all_gather_object`.
        """
        shape = tuple(array.shape)
        place = as_index(dim, "dim")
        if not -len(shape) <= place < len(shape):
            raise UsageError(f"dim={dim} is not a dim of shape {shape}")
        place %= len(shape)
        lengths = [int(length) for length in group.all_gather_object(int(shape[place]), timeout=timeout)]
        total = (*shape[:place], sum(lengths), *shape[place + 1 :])
        offset = [0] * len(shape)
        offset[place] = sum(lengths[: group.rank])
        return cls(array, total, offset, axes={place: axis} if axis is not None else None, replicas=replicas)

    @property
    def region(self) -> Region:
        """The place of the part in the tensor. One without dims has a single element, which the part has or not."""
        if not self.shape:
            return Region((), ())
        return Region(self.offset, tuple(int(length) for length in self.array.shape))

    def __repr__(self) -> str:
        return f"<Shard {tuple(self.array.shape)} at {self.offset} of {self.shape}>"


class PerRank:
    """A value that each rank has for itself, as the state of its random numbers.

    `load` returns it to the same rank of a group of the same size. With another size nobody's value fits, and it is
    that of `like`, or None.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"PerRank({shown(self.value)})"


def part_of_axis(shape: Sequence[int], axes: Mapping[str, str], mesh: Mesh) -> Region:
    """The part of a tensor that belongs to this rank, if each dim is cut evenly along its axis of the mesh."""
    offset, lengths = [0] * len(shape), list(shape)
    for dim, axis in axes.items():
        if axis in mesh:
            count, place, length = mesh.shape[axis], mesh.coordinate[axis], shape[int(dim)]
            offset[int(dim)] = length * place // count
            lengths[int(dim)] = length * (place + 1) // count - offset[int(dim)]
    return Region(tuple(offset), tuple(lengths))
