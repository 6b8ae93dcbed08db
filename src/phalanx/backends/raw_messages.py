"""The messages of `Backend.send` and `recv`: the bytes of a buffer, without tag or type."""

from __future__ import annotations

from typing import Any

from ..deadline import Deadline
from ..errors import PhalanxError, Timeout, UnsupportedArray, copy_for_raise
from ..system_limits import naming_limits
from ..transports.mailbox import BufferSink, PendingTransfer
from ..wire.control import OperationStatus
from ..wire.frames import FrameKind
from .lane import Lane

__all__ = ["RawMessages", "bytes_of"]


def bytes_of(data: Any, *, writable: bool) -> memoryview:
    """The bytes of anything with a contiguous buffer, without a copy.

    Raises:
        UnsupportedArray: There is no such buffer, or it cannot be written to.
    """
    try:
        view = memoryview(data)
    except TypeError:
        raise UnsupportedArray(
            f"{type(data).__name__} has no buffer (expected bytes, bytearray, memoryview or a NumPy array)"
        ) from None
    if not view.c_contiguous:
        raise UnsupportedArray("the buffer is not contiguous (make a copy first, or use a Group, which does)")
    if writable and view.readonly:
        raise UnsupportedArray(f"a read-only {type(data).__name__} cannot be received into")
    return view.cast("B") if view.nbytes else memoryview(bytearray())


class RawMessages:
    """Sends and receives raw messages on a lane. A `Watcher` of the control plane, so that a loss ends them."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane

    @property
    def world_ranks(self) -> tuple[int, ...]:
        """The world rank of each member."""
        return self.lane.members

    def send(self, view: memoryview, dst: int, deadline: Deadline) -> None:
        """Sends one message and waits until its memory is free again.

        Raises:
            Timeout: It could not be sent in time.
            PhalanxError: The lane or the channel has failed.
        """
        with naming_limits():
            operation = self.lane.start_send(dst, FrameKind.RAW, 0, b"", [view], deadline)
        self._finish(operation, deadline, f"send of {len(view)} bytes to rank {dst}", dst)

    def recv(self, view: memoryview, src: int, deadline: Deadline) -> None:
        """Receives one message into `view`.

        Raises:
            SizeMismatch: The message has another length.
            Timeout: None came in time.
            PhalanxError: The lane or the channel has failed.
        """
        operation = self.lane.post(src, 0, BufferSink(view))
        self._finish(operation, deadline, f"recv of {len(view)} bytes from rank {src}", src)

    def _finish(self, operation: PendingTransfer, deadline: Deadline, what: str, peer: int) -> None:
        lane, members = self.lane, self.lane.members
        try:
            with naming_limits():
                lane.wait([operation], deadline)
        finally:  # also after Ctrl-C: nothing may be written to the caller's memory later
            expired = lane.withdraw(operation)
        if expired:
            raise Timeout(
                f"{what}: not done within {deadline.seconds:g} s",
                missing=[members[peer]],
                seconds=deadline.seconds,
                rank=members[lane.rank],
                peer=members[peer],
                operation=what.split(" ", 1)[0],
            )
        if operation.error is not None:
            raise copy_for_raise(operation.error, what, members[lane.rank])

    # -- as a Watcher (see control_plane) ------------------------------------------------------------------------------

    def fail(self, error: PhalanxError) -> None:
        """Ends every operation with `error`."""
        self.lane.fail(error)

    def left(self, rank: int) -> None:
        """Ends receives from a rank that has closed its world on purpose."""
        self.lane.left(self.lane.members.index(rank))

    def status(self, sequence: int = 0) -> OperationStatus:
        """An empty status: raw messages keep no journal."""
        return OperationStatus("", 0, 0, "", False, float("inf"))

    def look_for_long_waits(self) -> None:
        """Does nothing: a receive may wait for a message as long as the program likes."""
