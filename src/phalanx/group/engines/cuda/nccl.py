"""Collectives by NCCL, for ranks that have a GPU each.

All ranks meet on the host first, with the fingerprint of their call: nothing is given to NCCL before all of them are
there and mean the same. Arrays that are only moved are moved as bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from ....cuda.arrays import DeviceArray
from ....cuda.nccl import DTYPES, OPS, Nccl
from ....errors import PhalanxError
from ...data.reduction import Reduction
from ...outcomes import DeadlinePassed
from ...running_collective import RunningCollective
from ..base import Engine
from .communicator import Communicator, Enqueue

__all__ = ["NcclCollectives"]


class NcclCollectives:
    """The collectives of one group.

    Args:
        host: The engine in which the ranks meet.
        communicator: Of all members.
    """

    def __init__(self, host: Engine, communicator: Communicator) -> None:
        self._host = host
        self._communicator = communicator

    def close(self) -> None:
        """Gives the communicator back."""
        self._communicator.close()

    def _run(self, running: RunningCollective, arrays: Sequence[DeviceArray | None], enqueue: Enqueue | None) -> None:
        """Meets the others and does an operation; without one, this rank has nothing to move.

        Raises:
            DeadlinePassed, FingerprintMismatch, PhalanxError: As every engine.
        """
        for array in arrays:
            if array is None:
                continue
            if array.nbytes and array.device != self._communicator.device:
                raise PhalanxError(
                    f"this array lies on GPU {array.device}, but the group's arrays lie on GPU "
                    f"{self._communicator.device} of this process since its first one (a rank uses one GPU for all "
                    "arrays of a group)"
                )
            if not array.ready.wait(running.deadline):
                raise DeadlinePassed([self._host.rank])
        self._host.barrier(running)
        if enqueue is not None:
            self._communicator.run(running, enqueue)

    def broadcast(self, running: RunningCollective, flat: DeviceArray, src: int) -> None:
        """As the engine's methods of these names."""
        place, size = flat.address, flat.nbytes
        self._run(
            running,
            [flat],
            (lambda nccl, comm, stream: nccl.broadcast(comm, place, place, size, src, stream)) if size else None,
        )

    def all_reduce(self, running: RunningCollective, flat: DeviceArray, reduction: Reduction) -> None:
        how, place, size = _how(flat, reduction), flat.address, flat.size
        self._run(
            running,
            [flat],
            (lambda nccl, comm, stream: nccl.all_reduce(comm, place, place, size, *how, stream)) if size else None,
        )

    def reduce(self, running: RunningCollective, flat: DeviceArray, dst: int, reduction: Reduction) -> None:
        how, place, size = _how(flat, reduction), flat.address, flat.size
        self._run(
            running,
            [flat],
            (lambda nccl, comm, stream: nccl.reduce(comm, place, place, size, *how, dst, stream)) if size else None,
        )

    def reduce_scatter(
        self, running: RunningCollective, source: DeviceArray, target: DeviceArray, reduction: Reduction
    ) -> None:
        how, whole, part, size = _how(source, reduction), source.address, target.address, target.size
        self._run(
            running,
            [source, target],
            (lambda nccl, comm, stream: nccl.reduce_scatter(comm, whole, part, size, *how, stream)) if size else None,
        )

    def all_gather(
        self, running: RunningCollective, source: DeviceArray, target: DeviceArray, counts: Sequence[int]
    ) -> None:
        part, whole, sizes = source.address, target.address, [count * source.itemsize for count in counts]

        def alike(nccl: Nccl, comm: Any, stream: int) -> None:
            nccl.all_gather(comm, part, whole, sizes[0], stream)

        def uneven(nccl: Nccl, comm: Any, stream: int) -> None:
            nccl.group_start()
            try:
                for root, (start, size) in enumerate(_places(sizes)):
                    if size:
                        mine = part if root == self._host.rank else whole + start
                        nccl.broadcast(comm, mine, whole + start, size, root, stream)
            finally:
                nccl.group_end()

        self._run(running, [source, target], (alike if len(set(sizes)) == 1 else uneven) if any(sizes) else None)

    def gather(
        self,
        running: RunningCollective,
        source: DeviceArray,
        target: DeviceArray | None,
        dst: int,
        counts: Sequence[int],
    ) -> None:
        rank, sizes = self._host.rank, [count * source.itemsize for count in counts]
        places = _places(sizes)
        sends = [(source.address, sizes[rank], dst)] if rank != dst else []
        receives = []
        own = (0, 0, 0)
        if target is not None:
            receives = [(target.address + at, size, peer) for peer, (at, size) in enumerate(places) if peer != rank]
            own = (target.address + places[rank][0], source.address, sizes[rank])
        self._exchange(running, [source, target], own, sends, receives)

    def all_to_all(
        self, running: RunningCollective, source: DeviceArray, target: DeviceArray, sizes: npt.NDArray[np.int64]
    ) -> None:
        rank, matrix = self._host.rank, sizes * source.itemsize
        sending, receiving = _places(matrix[rank].tolist()), _places(matrix[:, rank].tolist())
        own = (target.address + receiving[rank][0], source.address + sending[rank][0], sending[rank][1])
        sends = [(source.address + at, size, peer) for peer, (at, size) in enumerate(sending) if peer != rank]
        receives = [(target.address + at, size, peer) for peer, (at, size) in enumerate(receiving) if peer != rank]
        self._exchange(running, [source, target], own, sends, receives)

    def _exchange(
        self,
        running: RunningCollective,
        arrays: Sequence[DeviceArray | None],
        own: tuple[int, int, int],
        sends: list[tuple[int, int, int]],
        receives: list[tuple[int, int, int]],
    ) -> None:
        """Sends and receives together, so that their order does not matter.

        Args:
            own: What this rank has for itself: where it goes, where it lies, and its bytes.
            sends: An address, bytes and a rank for each; with those of no bytes, which are left out.
            receives: The same.
        """
        sends, receives = [one for one in sends if one[1]], [one for one in receives if one[1]]

        def exchange(nccl: Nccl, comm: Any, stream: int) -> None:
            self._communicator.copy(*own)
            if not sends and not receives:
                return
            nccl.group_start()
            try:
                for address, size, peer in sends:
                    nccl.send(comm, address, size, peer, stream)
                for address, size, peer in receives:
                    nccl.recv(comm, address, size, peer, stream)
            finally:
                nccl.group_end()

        self._run(running, arrays, exchange)


def _how(flat: DeviceArray, reduction: Reduction) -> tuple[int, int]:
    """NCCL's numbers of a dtype and a reduction."""
    return DTYPES[reduction.dtype or flat.dtype.name], OPS[reduction.name]


def _places(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Where parts of these lengths begin that lie one after another, and the lengths."""
    return list(zip(accumulate(sizes, initial=0), sizes, strict=False))
