"""The group of a step: once a member is lost, its verbs do nothing, and the step is thrown away at its end."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import PeerLost, PhalanxError, Timeout, UsageError, copy_for_raise
from ..group import Group
from ..rendezvous.error_codec import lost_peer

if TYPE_CHECKING:
    from ..backends.base import Backend

__all__ = ["StepGroup", "is_loss"]

F = TypeVar("F", bound=Callable[..., Any])
IN_PLACE = ("all_reduce", "all_reduce_many", "barrier", "broadcast", "reduce")
"""The verbs that leave something sensible behind when nothing happens."""


def is_loss(error: BaseException) -> bool:
    """True if an error says that ranks are gone or too slow: then a step can be done again with the others."""
    said = getattr(error, "phalanx_error", error)  # the first for an error of torch's types
    return isinstance(said, PeerLost | Timeout) or lost_peer(error) is not None


class StepGroup(Group):
    """The ranks that do a step. Outside of a `with step:` block, a loss does not interrupt the program."""

    def __init__(self, backend: Backend, *, _owns_backend: bool = False) -> None:
        super().__init__(backend, _owns_backend=_owns_backend)
        self.raises = True
        """False while a step runs that has no block which could take the error."""
        self.loss: BaseException | None = None
        """Why the step is thrown away."""
        self.committed = False
        """True from a step's `commit` to its end."""
        self._torch: Group | None = None
        """The group of torch's world, which `to_torch` has made of this one."""

    def to_torch(self) -> Any:
        made = super().to_torch()
        self._torch = made.group
        return made

    @property
    def has_lost(self) -> bool:
        """True if a member is known to be lost or too slow.

        An error of any type may come of that: torch's C++ makes others of those that it is given.
        """
        cause = self._cause
        return cause is not None and is_loss(cause)

    def check_whole(self) -> None:
        """Raises why this group, or torch's world of it, is broken; nothing if they work."""
        cause = self._cause
        if cause is not None:
            raise copy_for_raise(cause, "the vote", self._world_rank)

    @property
    def _cause(self) -> PhalanxError | None:
        torch = self._torch
        return self._health.cause or (torch._health.cause if torch is not None else None)

    def _check(self) -> None:
        if self.committed:
            raise UsageError(
                "a step must not use its group after commit(): what can fail comes before it (a loss found later could "
                "not be taken back)"
            )
        super()._check()


def _quiet(verb: F) -> F:
    """The verb of a step: after a loss it returns its first argument as it is, instead of raising."""

    @functools.wraps(verb)
    def call(self: StepGroup, *args: Any, **options: Any) -> Any:
        if self.committed:
            self._check()
        if self.raises:
            return verb(self, *args, **options)
        if self.loss is None or options.get("async_op"):  # there is no result to hand out that can be waited for
            try:
                return verb(self, *args, **options)
            except PhalanxError as error:
                if not is_loss(error) or options.get("async_op"):
                    raise
                self.loss = error
        return args[0] if args else options.get("x", options.get("arrays"))

    return call  # type: ignore[return-value]


for _name in IN_PLACE:
    setattr(StepGroup, _name, _quiet(getattr(Group, _name)))
