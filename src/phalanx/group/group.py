"""The group: an ordered set of ranks, and all that they can do together."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, overload

import numpy as np
import numpy.typing as npt

from .._native import core
from ..arguments import as_index, as_shape
from ..backends.base import Backend, LaneBackend
from ..backends.plain import as_lane_backend
from ..backends.subgroup import SubBackend
from ..deadline import Deadline
from ..errors import CheckpointError, Closed, Desync, PeerLost, PhalanxError, UsageError, copy_for_raise
from ..exception_text import describe
from ..frames import hide_frames, hides_frames, user_traceback
from ..interrupts import insist
from ..rendezvous.error_codec import lost_peer
from ..system_limits import naming_limits
from ..wire.control import Regroup, View
from .core import release
from .data.arrays import dtype_of
from .hints import add_hint, missing_attribute
from .verbs.exchanges import Exchanges
from .verbs.extremes import Extremes
from .verbs.object_messages import ObjectMessages
from .verbs.objects import ObjectCollectives
from .verbs.point_to_point import PointToPoint
from .verbs.reductions import Reductions
from .verbs.scans import Scans

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Group"]


class Group(PointToPoint, ObjectMessages, Reductions, Scans, Extremes, Exchanges, ObjectCollectives):
    """An ordered set of ranks with the collectives and messages among them.

    `phalanx.init()` gives the group of everybody; `subgroup` and `split` make smaller ones. A group that lost a member
    is broken for good: every call raises the first cause. Ranks in arguments and results are those of the group; ranks
    in errors are those of the world.

    Args:
        backend: How the bytes move. It stays the caller's: closing the group does not close it.
    """

    def __init__(self, backend: Backend, *, _owns_backend: bool = False) -> None:
        with naming_limits():
            super().__init__(as_lane_backend(backend))
        self._owns_backend = _owns_backend
        self._leaving = False
        """True once this rank asks for the next view of the group."""

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ", broken" if self._health.cause is not None else ""
        return f"<Group rank {self.rank} of {self.world_size} on {type(self._backend).__name__}{state}>"

    if not TYPE_CHECKING:  # type checkers would take every name for one that exists

        def __getattr__(self, name: str) -> NoReturn:
            try:
                raise AttributeError(missing_attribute(type(self), name), name=name)
            except AttributeError as error:
                error.__traceback__ = None  # the line that asked for it says it all
                raise

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        try:
            raise TypeError(
                "a group cannot be copied, pickled or sent: it belongs to this process (call phalanx.init() in each "
                "process of the job, and keep the group out of what you copy)"
            )
        except TypeError as error:
            error.__traceback__ = None  # likewise
            raise

    # -- more groups ---------------------------------------------------------------------------------------------------

    @hides_frames
    def subgroup(self, ranks: Iterable[int]) -> Group:
        """A group of some of these ranks, sorted. Only they call it; no other rank has to take part.

        Raises:
            InvalidRank: A rank is not in this group, or this rank is not among them.
            InvalidWorldSize: There are none.
        """
        self._check()
        return Group(SubBackend(self._backend, ranks), _owns_backend=True)

    @hides_frames
    def split(self, color: int | None, key: int = 0, *, timeout: float | None = None) -> Group | None:
        """Cuts this group into one group per color, each ordered by key and then by rank. Everybody calls it.

        Returns:
            The group of this rank's color; None for `color=None`.

        Raises:
            As `barrier`.
        """
        self._check()
        if isinstance(color, (bool, np.bool_)):  # a condition is a common color
            color = int(color)
        elif color is not None:
            color = as_index(color, "color", "a whole number, a condition or None")
        key = as_index(key, "key")
        everyone = self.all_gather_object((color, key), timeout=timeout)
        if color is None:
            return None
        chosen = sorted((k, rank) for rank, (c, k) in enumerate(everyone) if c == color)
        backend = SubBackend(self._backend, [rank for _, rank in chosen], keep_order=True)
        return Group(backend, _owns_backend=True)

    def _labelled_subgroup(self, ranks: Iterable[int], label: str) -> Group:
        """A group in the order given, told apart by its label: ranks may ask for several of them in any order."""
        self._check()
        return Group(SubBackend(self._backend, ranks, keep_order=True, label=label), _owns_backend=True)

    @property
    def epoch(self) -> int:
        """The number of this group's view: 0 for a group that was made, one more after each `shrink`."""
        return self._backend.epoch

    @hides_frames
    def shrink(self, *, timeout: float | None = None) -> Group:
        """The group of those that are left, after `PeerLost` or another error that broke this one.

        All members that are alive call it; those that have not when the time is over are voted out. The directory
        decides, so all that return have the same view: the same members, in the order of this group, and the same
        `epoch`. Messages of this group never reach the new one. This group stays broken; its memory is given back.

        Raises:
            Evicted: This rank came too late: the others went on without it.
            Timeout: There is no new view, for all that asked: fewer than half of the living members did in time.
            UnsupportedOp: The backend has no directory (only the mesh has).
            UsageError: This rank has left the group already.
            RendezvousError: The directory is gone.
            PeerLost: A rank has ended the world on purpose.
        """
        return Group(self._next_view(self._deadline(timeout))[0], _owns_backend=True)

    def _next_view(
        self, deadline: Deadline, *, minimum: int = 1, joins: bool = False, excluded: Sequence[int] = ()
    ) -> tuple[LaneBackend, View]:
        """Leaves this group for the next view of it, which the directory decides on.

        Args:
            minimum: The fewest members that it may have.
            joins: Whether ranks that wait may come in.
            excluded: Ranks of this group that are left out, dead or alive. The same on all that call.
        """
        if self._closed:
            raise Closed("this group was closed", rank=self._world_rank)
        self._backend.check_usable()
        if self._control.ended is not None:
            raise copy_for_raise(self._control.ended, "shrink", self._world_rank)
        with self._lock:
            if self._leaving:
                raise UsageError(
                    "this group was left for its next view, or another thread is about to (use the group that shrink() "
                    "returned)"
                )
            self._leaving = True
        try:
            if self._health.cause is None:  # nothing can go on here, also where another member has seen no error
                reason = PeerLost(self._world_rank, "it left this group for its next view", rank=self._world_rank)
                self._health.fail(UsageError("this rank has left this group for its next view", rank=self._world_rank))
                self._control.break_group(self._context, reason)
            members = [name for rank, name in enumerate(self.members) if rank not in excluded]
            found = self._backend.next_view(
                Regroup(
                    self._context,
                    self.epoch,
                    members,
                    deadline.remaining(),
                    minimum,
                    joins,
                    self._backend.is_world,
                )
            )
        except BaseException:
            self._leaving = False  # it may ask again
            raise
        self._told = True
        self._retire()
        return found

    @hides_frames
    def to_torch(self) -> Any:
        """Makes these ranks the world of `torch.distributed`, in place of the one that this call made before.

        Afterwards torch's DDP, FSDP2 and all else that uses the default process group run among them. All members call
        it, and again on the next group when the world has changed, as in `px.elastic.steps`: then wrap the model anew.
        torch's store of that process group is this rank's own, and not shared.

        Returns:
            The process group.

        Raises:
            UsageError: torch has a world already that was not made by this call.
        """
        from .of_torch import make_world

        self._check()
        return make_world(self)

    def _retire(self) -> None:
        """Gives back what a broken group holds. Its calls still raise the first cause."""
        if self._worker is not None:
            self._worker.stop()
        for cause in (self._health.cause, self._messages.error, self._collectives.error):
            if cause is not None:  # the world keeps it, and the frames that raised it hold memory of this group
                cause.__traceback__ = None
        self._messages.close()
        self._collectives.close()
        # Here, and not when the group is collected: that may be in the thread that hears of the next loss.
        for engine in (self._device_engine, self._engine):
            if engine is not None:
                engine.close()
        self._fast_path = self._engine = self._device_engine = None

    # -- memory --------------------------------------------------------------------------------------------------------

    @overload
    def empty(
        self, shape: int | Sequence[int], dtype: npt.DTypeLike = ..., *, device: None = ...
    ) -> npt.NDArray[Any]: ...
    @overload
    def empty(self, shape: int | Sequence[int], dtype: npt.DTypeLike = ..., *, device: Any) -> Any: ...

    @hides_frames
    def empty(self, shape: int | Sequence[int], dtype: npt.DTypeLike = np.float32, *, device: Any = None) -> Any:
        """A new array in memory that the members on this host share: collectives need not copy it.

        Its values are arbitrary. The memory is given back when the array is collected. Where no memory can be shared,
        or there is no more room (`Options.segment_heap`), it is an ordinary array. The memory is set up by the group's
        first collective; if there was none yet, this call is one, and all members make it.

        Args:
            device: `"cuda"` or `"cuda:1"`: a tensor on that GPU, or an array of CuPy if torch is not imported, in
                memory that the other ranks can open whatever the library's own allocator does. Without it, an array of
                NumPy.

        Raises:
            UsageError: The shape is not one, arrays of the dtype cannot be sent, or there is no such device.
            BackendUnavailable: This machine has no GPU.
            As `barrier`.
        """
        self._check()
        wanted = dtype_of(dtype)
        lengths = as_shape(shape, wanted.itemsize)
        if device is not None and str(device) != "cpu":
            from ..cuda.memory import empty_on_gpu  # most programs have no GPU

            return empty_on_gpu(lengths, wanted, str(device))
        if self._engine is None:
            self.barrier()
        size = math.prod(lengths) * wanted.itemsize
        segment = self._engine.segment if self._engine is not None else None
        memory = segment.empty(size) if segment is not None else None
        return np.empty(lengths, wanted) if memory is None else memory.view(wanted).reshape(lengths)

    # -- the end -------------------------------------------------------------------------------------------------------

    @hides_frames
    def abort(self, reason: str) -> None:
        """Ends the world for every rank: their operations, now and later, raise `PeerLost` with this reason.

        Raises:
            Closed: The group was closed already.
        """
        self._backend.check_usable()
        self._control.abort(f"it aborted the world: {reason}", "", on_purpose=True)

    @hides_frames
    def close(self) -> None:
        """Sends what is still to be sent, says goodbye, and gives everything back.

        May be called twice: what an exception has left, as that of Ctrl-C, is done then.

        Raises:
            Desync: This rank was in another operation than another rank, and no call has said so yet. Who only has to
                send something, as the root of a broadcast or all but the root of a gather, does not wait for the
                others, so it may learn only now that they were elsewhere.
            CheckpointError: The last `checkpoint.save_async` failed, and nobody has looked yet.
        """
        if self._backend.forked:
            return  # the locks below may be held by threads that exist only in the parent
        problem: PhalanxError | None = None
        while self._before_close:
            try:
                self._before_close.pop()()
            except PhalanxError as error:  # raised when everything is given back
                problem = problem or error
        try:
            with self._lock:
                first, self._closed = not self._closed, True
            if not first and not self._is_half_closed:
                return
            try:
                if first and self._health.cause is None and not self._backend.is_unusable:
                    self._messages.flush(Deadline(self._backend.meeting_timeout))
                    self._wait_for_receivers()
            finally:  # also after Ctrl-C
                insist(self._give_back)
        except BaseException:
            self._is_half_closed = True
            raise
        if isinstance(self._health.cause, Desync) and not self._told:
            raise copy_for_raise(self._health.cause, "close", self._world_rank)
        if problem is not None:
            raise problem

    def _give_back(self) -> None:
        """The end of `close`. Called again, it does what an exception, as by Ctrl-C, has left."""
        if self._owns_backend and self._backend.owns_world:
            self._control.announce_leaving()
        self._control.keep_status(self._context, self._journal.status(locate=str))
        release(self._control, self._context, self._closers)
        self._release.detach()
        self._closers.clear()
        self._fast_path = self._engine = self._device_engine = None  # gives the segment back
        if self._owns_backend:
            self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            add_hint(error, type(self))
        ends_world = self._owns_backend and self._backend.owns_world and not self._closed
        if error is not None and ends_world and not _is_success(error):
            with contextlib.suppress(PhalanxError):
                self._backend.check_usable()
                self._control.abort(f"it raised {describe(error)}", user_traceback(error), lost_peer(error))
        if error is None:
            self.close()
        else:
            with contextlib.suppress(Desync, CheckpointError):  # they must not hide what the program raised
                self.close()


def _take_fast_paths(group: type[Group]) -> None:
    """Puts a method of the core in the place of each verb that has a fast path. It calls the verb if that declines."""
    if core is not None:
        for verb in core.VERBS:
            setattr(group, verb, core.VerbMethod(getattr(group, verb), hide_frames))


_take_fast_paths(Group)


def _is_success(error: BaseException) -> bool:
    return isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and error.code in (None, 0))
