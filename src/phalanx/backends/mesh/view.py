"""A view of a group on the mesh: the members that go on, as a backend of their own."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from ...config import Timeouts
from ...wire.control import Regroup, View
from ..base import LaneBackend
from ..contexts import derive_context
from ..lane import Lane
from ..ports import Accept, LinkPort
from .lane import MeshLane
from .ports import MeshPort
from .world import MeshWorld

__all__ = ["ViewBackend"]


class ViewBackend(LaneBackend):
    """The members of a view, in its order. Closing it closes its lanes, and the world only after `own_world`.

    Its context is derived from the view, and every channel and segment belongs to one context: a message of an earlier
    epoch finds nobody here.

    Args:
        root: The backend that owns the world; it stays open as long as this one is in use.
        view: As the directory decided.
        is_world: Whether these are all ranks of the world.
    """

    owns_world = False

    def __init__(self, root: LaneBackend, world: MeshWorld, view: View, *, is_world: bool) -> None:
        self._root = root
        self._world = world
        self._lanes: weakref.WeakSet[Lane] = weakref.WeakSet()
        super().__init__(
            view.members.index(world.rank),
            view.members,
            world,
            context=derive_context(view.base, "view", view.epoch, tuple(view.members)),
            timeouts=Timeouts(root.timeout, root.meeting_timeout),
            options=root.options,
        )
        self.epoch = view.epoch
        self.gpu_choice = root.gpu_choice
        self.is_world = is_world
        self.take_hosts([world.roster[member] for member in view.members])

    def check_usable(self) -> None:
        super().check_usable()
        self._root.check_usable()

    def open_lane(self, context: bytes, number: int, ranks: Sequence[int]) -> Lane:
        self.check_usable()
        lane = MeshLane(self._world, context, number, [self.world_ranks[rank] for rank in ranks])
        self._lanes.add(lane)
        return lane

    def open_port(self, context: bytes, number: int, ranks: Sequence[int], accept: Accept) -> LinkPort:
        self.check_usable()
        return MeshPort(self._world, (context, number), [self.world_ranks[rank] for rank in ranks], accept)

    def next_view(self, request: Regroup) -> tuple[LaneBackend, View]:
        self.check_usable()
        return self._root.next_view(request)

    def own_world(self) -> None:
        """From now on, closing this backend leaves the world, and dropping the first one does not."""
        self.owns_world = True

    def _close(self) -> None:
        for lane in list(self._lanes):  # of groups that outlive their backend
            lane.close()
        if self.owns_world:
            self._root.close()
