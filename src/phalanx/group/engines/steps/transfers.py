"""The transfers between two ranks in one step of a schedule.

On a direct lane the frames go past queues and mailboxes (`transports.direct`). A frame that cannot, because the channel
is not there yet or has something else to say first, goes the way of every message, as all do on other lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from ...._native import reduce_into
from ....algorithms.schedule import Recv, Send
from ....backends.lane import Lane
from ....deadline import Deadline
from ....transports.direct import PIECE, DirectReceive, DirectSend, can_receive, can_send
from ....transports.mailbox import Envelope, PendingTransfer, Receive, Sink
from ....transports.stream import Buffer
from ....transports.waker import Waker
from ....wire.frames import FrameKind, pack_header
from ...outcomes import FingerprintMismatch

__all__ = ["Array", "Chunks", "Flow", "Inflow", "Job", "StepSink", "memory", "outflow"]

Array = npt.NDArray[Any]
Chunks = Sequence[Array] | Mapping[int, Array]


def memory(flat: Array) -> memoryview:
    """The bytes of a chunk."""
    return flat.view(np.uint8).data


class StepSink(Sink):
    """Takes one transfer of the expected operation and size; anything else is a mismatch."""

    def __init__(self, target: memoryview, fingerprint: int) -> None:
        self._target = target
        self._fingerprint = fingerprint

    def open(self, envelope: Envelope) -> memoryview:
        if (
            envelope.tag != self._fingerprint
            or envelope.kind is not FrameKind.STEP
            or envelope.size != len(self._target)
        ):
            raise FingerprintMismatch(envelope.src)
        return self._target


class Job:
    """The state that all steps of one collective share; see `steps.run`."""

    __slots__ = (
        "_headers",
        "check_peers",
        "chunks",
        "deadline",
        "dtype",
        "fingerprint",
        "lane",
        "op",
        "sources",
        "waker",
    )

    def __init__(
        self,
        lane: Lane,
        chunks: Chunks,
        fingerprint: int,
        deadline: Deadline,
        dtype: str | None,
        op: str,
        sources: Mapping[int, Array] | None,
        check_peers: Callable[[], None],
    ) -> None:
        self.lane = lane
        self.chunks = chunks
        self.fingerprint = fingerprint
        self.deadline = deadline
        self.dtype = dtype
        self.op = op
        self.sources = dict(sources) if sources else {}
        """Those chunks that have not been written to yet, and lie elsewhere."""
        self.check_peers = check_peers
        self.waker: Waker | None = None
        """Set by whatever happens to the lane, once `wake_up` has made it."""
        self._headers: dict[int, bytes] = {}

    def header(self, size: int) -> bytes:
        """The header of a transfer of so many bytes."""
        header = self._headers.get(size)
        if header is None:
            header = self._headers[size] = pack_header(FrameKind.STEP, self.fingerprint, 0, size)
        return header

    def combine(self, target: Array, received: Array, before: bool) -> None:
        """`target = target op received`, or with `before` `received op target`, which leaves nothing of `received`."""
        if before:
            reduce_into(received, target, self.op, dtype=self.dtype)
            target[:] = received
        else:
            reduce_into(target, received, self.op, dtype=self.dtype)

    def current(self, chunk: int) -> Array:
        """The memory in which a chunk lies now."""
        return self.sources[chunk] if chunk in self.sources else self.chunks[chunk]

    def finish(self, transfer: Recv, received: Array) -> None:
        """Reduces a chunk that was received as a whole. Its memory is free to be overwritten."""
        target, source = self.chunks[transfer.chunk], self.sources.pop(transfer.chunk, None)
        if source is not None:
            target[:] = source
        self.combine(target, received, transfer.before)

    def drive(self, operations: Sequence[PendingTransfer]) -> list[tuple[int, int]] | None:
        """Moves what can be moved of these messages; see `Lane.drive`. Lanes that are not direct do it in `wait`."""
        return self.lane.drive(operations) if self.lane.direct else []

    def wake_up(self) -> Waker:
        """The waker of this thread. After the first call, look at everything once more before sleeping."""
        if self.waker is None:
            self.waker = Waker.take()
            self.lane.add_sleeper(self.waker)
        return self.waker

    def end(self) -> None:
        """Gives back what was needed for waiting."""
        if self.waker is not None:
            self.lane.remove_sleeper(self.waker)
            self.waker.give_back()
            self.waker = None


class Flow(Protocol):
    """Something that is moved piece by piece until it is done."""

    @property
    def done(self) -> bool:
        """True once nothing is left."""

    @property
    def peer(self) -> int:
        """The rank at the other end."""

    def move(self, piece: int) -> bool:
        """Moves what goes now, up to `piece` bytes. True if something was moved.

        Raises:
            FingerprintMismatch: The other side is in another operation.
            PhalanxError: As the channel fails.
        """

    def polled(self) -> list[tuple[int, int]]:
        """The descriptors and events to wait for when nothing can be moved."""

    @property
    def operations(self) -> Sequence[PendingTransfer]:
        """The messages under way, where it goes by messages."""


def outflow(job: Job, peer: int, sends: Sequence[Send]) -> Flow:
    """The frames to one rank.

    Raises:
        PhalanxError: There is no channel to it.
    """
    payloads = [memory(job.current(send.chunk)) for send in sends]
    if not job.lane.direct:
        return _Queued(job, peer, payloads)
    channel = job.lane.outbound(peer, job.deadline)
    if not can_send(channel):
        return _Queued(job, peer, payloads)
    views: list[Buffer] = []
    for payload in payloads:
        views.append(job.header(len(payload)))
        if len(payload):
            views.append(payload)
    return _Written(channel, views)


class _Written(DirectSend):
    """Frames to a rank that are written to the channel."""

    __slots__ = ()

    operations: ClassVar[Sequence[PendingTransfer]] = ()


class _Queued:
    """Frames to a rank that go the way of every message."""

    __slots__ = ("_job", "_polled", "done", "operations", "peer")

    def __init__(self, job: Job, peer: int, payloads: Sequence[memoryview]) -> None:
        self.peer = peer
        self.done = False
        self._job = job
        start = job.lane.start_send
        self.operations: Sequence[PendingTransfer] = [
            start(peer, FrameKind.STEP, job.fingerprint, b"", [payload], job.deadline) for payload in payloads
        ]
        self._polled: list[tuple[int, int]] | None = None

    def move(self, piece: int) -> bool:
        before = len(self.operations)
        self._polled = self._job.drive(self.operations)
        for operation in self.operations:
            if operation.error is not None:
                raise operation.error
        self.operations = [operation for operation in self.operations if not operation.done]
        self.done = not self.operations
        return self.done or len(self.operations) < before or self._polled is None

    def polled(self) -> list[tuple[int, int]]:
        return self._polled or []


class Inflow:
    """The frames from one rank.

    Args:
        late: Gets the reductions that wait until all transfers of the step are done.
    """

    __slots__ = ("_direct", "_job", "_late", "_left", "_polled", "_posted", "_temporary", "done", "peer")

    def __init__(self, job: Job, peer: int, transfers: Sequence[Recv], late: list[tuple[Recv, Array]]) -> None:
        self.peer = peer
        self.done = False
        self._job = job
        self._late = late
        self._left = list(transfers)
        """The first is under way."""
        self._direct: DirectReceive | None = None
        self._posted: Receive | None = None
        self._polled: list[tuple[int, int]] | None = None
        self._temporary: Array | None = None
        """Memory for a chunk that will be reduced as a whole."""
        self._begin()

    def move(self, piece: int) -> bool:
        direct = self._direct
        if direct is None:
            return self._move_posted()
        moved = direct.move(piece)
        if direct.done:
            self._next()
        elif direct.refused:
            self._post()
        return moved

    def polled(self) -> list[tuple[int, int]]:
        return self._direct.polled() if self._direct is not None else self._polled or []

    @property
    def operations(self) -> Sequence[PendingTransfer]:
        return () if self._posted is None else (self._posted,)

    def withdraw(self) -> None:
        """Takes back a message that is expected: nothing may be written to its memory any more."""
        if self._posted is not None:
            self._job.lane.withdraw(self._posted)

    def _begin(self) -> None:
        job, transfer = self._job, self._left[0]
        channel = next(iter(job.lane.inbound(self.peer)), None) if job.lane.direct else None
        if channel is None or not can_receive(channel):
            self._post()
            return
        target = job.chunks[transfer.chunk]
        size = target.nbytes
        use: Callable[[int], int] | None = None
        if not transfer.reduce:
            view = memory(target)
        elif transfer.late or size <= PIECE:
            self._temporary = np.empty_like(target)
            view = memory(self._temporary)
        else:
            reducer = _Reducer(job, transfer)
            view, use = reducer.scratch.data, reducer.use
        self._direct = DirectReceive(channel, job.header(size), size, view, use)

    def _next(self) -> None:
        transfer = self._left.pop(0)
        temporary, self._temporary = self._temporary, None
        if temporary is None:
            self._job.sources.pop(transfer.chunk, None)  # it lies in its own place now
        elif transfer.late:
            self._late.append((transfer, temporary))
        else:
            self._job.finish(transfer, temporary)
        self._direct = self._posted = None
        if self._left:
            self._begin()
        else:
            self.done = True

    # -- the way of every message --------------------------------------------------------------------------------------

    def _post(self) -> None:
        job, transfer = self._job, self._left[0]
        self._direct = None
        target = job.chunks[transfer.chunk]
        if transfer.reduce:
            target = self._temporary = np.empty_like(target)
        self._posted = job.lane.post(self.peer, None, StepSink(memory(target), job.fingerprint))
        if job.lane.direct:  # other lanes wait themselves
            self._posted.add_waker(job.wake_up())

    def _move_posted(self) -> bool:
        posted = self._posted
        assert posted is not None
        self._polled = self._job.drive([posted])
        if not posted.done:
            return self._polled is None
        if isinstance(posted.error, FingerprintMismatch):
            assert posted.envelope is not None
            raise FingerprintMismatch(self._job.lane.source_of(posted.envelope))
        if posted.error is not None:
            raise posted.error
        self._next()
        return True


class _Reducer:
    """Reduces a chunk piece by piece, as it comes into a scratch buffer."""

    __slots__ = ("_done", "_job", "_source", "_target", "_transfer", "scratch")

    def __init__(self, job: Job, transfer: Recv) -> None:
        self.scratch = np.empty(PIECE, np.uint8)
        self._job = job
        self._transfer = transfer
        self._target = job.chunks[transfer.chunk]
        self._source = job.sources.get(transfer.chunk)
        self._done = 0

    def use(self, filled: int) -> int:
        """Takes the whole elements; moves the rest to the front."""
        count, rest = divmod(filled, self._target.itemsize)
        part = slice(self._done, self._done + count)
        if self._source is not None:
            self._target[part] = self._source[part]
        received = self.scratch[: filled - rest].view(self._target.dtype)
        self._job.combine(self._target[part], received, self._transfer.before)
        self._done = part.stop
        if rest:
            self.scratch[:rest] = self.scratch[filled - rest : filled]
        return rest
