"""The process group as the dispatcher, the CPU backend and the groups for other devices use it."""

from __future__ import annotations

from typing import Any, Protocol

from ..group import Group

__all__ = ["TorchGroup"]


class TorchGroup(Protocol):
    """A process group of torch that is made of a group of Phalanx."""

    group: Group
    hooked: bool
    """Whether every operation goes by torch's dispatcher, because a hook of the group is to see it."""
    fast_calls: Any
    """The core's way of simple calls, if there is one."""
    device_groups: dict[str, Any]
    """The groups for tensors that are not on the CPU, by the type of the device; None while one is being made."""
    group_name: str
    group_desc: str

    def does_itself(self, device_type: str) -> bool:
        """Whether operations on that type of device are Phalanx's own, not those of another group of torch."""

    def prepare_dispatch(self, device_type: str) -> None:
        """Makes sure that torch's dispatcher leads back to this group."""

    def go_on_with(self, begun: Any) -> Any:
        """Goes on with a message that the core has begun; returns its handle."""

    def get_group_store(self) -> Any:
        """The store that torch made for the group."""

    def set_timeout(self, timeout: Any) -> None:
        """Changes the time that an operation may take."""

    def abort(self) -> None:
        """Fails all operations under way."""

    def _get_sequence_number_for_group(self) -> int:
        """The number of collectives so far, by torch's name."""
