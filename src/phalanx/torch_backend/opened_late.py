"""Handles that the core makes, of operations that it has prepared.

Most are only waited for, which the core does by itself. To make the rest of a handle (a lock, what a future needs)
takes longer than a short operation, so it is made when somebody asks for it. The handle is open then.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from .._native import core
from ..frames import hide_frames

if TYPE_CHECKING:
    from .work import UnfinishedWork as _Base
else:
    _Base = object

__all__ = ["OpenedLate"]

_opening = threading.RLock()
"""The handler of a signal may open another handle meanwhile."""


class OpenedLate(_Base):
    """Comes before `UnfinishedWork` or a subclass of it among the bases of a handle. The core sets `_call`."""

    __slots__ = ()

    _call: Any
    """The core's `OperationInLine`."""

    def wait(self, timeout: Any = None) -> bool:
        """As the base, where the core has not done it: it does if the operation is the next one in line."""
        self._open()
        try:
            return super().wait(timeout)
        except BaseException as error:
            hide_frames(error)
            raise

    def is_completed(self) -> bool:
        self._open()
        return super().is_completed()

    def is_success(self) -> bool:
        return self._call.ended and self._call.error is None

    def exception(self) -> BaseException | None:
        error: BaseException | None = self._call.error
        return error

    def result(self) -> list[Any]:
        self._open()
        return super().result()

    def get_future(self) -> Any:
        self._open()
        return super().get_future()

    @property
    def has_callbacks(self) -> bool:
        """Whether `call_back` has something to do."""
        return self._call.is_open and super().has_callbacks

    def call_at_end(self, job: Any) -> None:
        self._open()
        super().call_at_end(job)

    def run(self) -> None:
        """Does the operation, or begins it, and keeps its error. The line calls this once, in the operation's turn."""
        self._call.run(self)

    def _open(self) -> None:
        """Makes the rest of the handle."""
        with _opening:
            if self._call.is_open:
                return
            self._set_up(self._call.tensors)
            if self._call.open():
                self._error = self._call.error
                self._ended = True

    def _end(self, error: BaseException | None) -> None:
        super()._end(error)
        self._call.note_end(error)


if core is not None:
    OpenedLate.wait = core.WaitMethod(OpenedLate.wait, None)  # type: ignore[method-assign]
