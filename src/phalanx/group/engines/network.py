"""Collectives over the network: a schedule for each, run over the group's lane."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...algorithms import Schedule, bruck, chunk_bounds, scan, select, telling, tree
from ...backends.lane import Lane
from ...config.algorithms import parse_algorithms
from ...errors import UsageError
from ..data.arrays import Description, adapt
from ..data.reduction import Reduction
from ..data.shapes import misfit
from ..fast_path import AnyFastPath, FastPathMaker
from ..running_collective import RunningCollective
from .base import Engine, EngineSetup, Flat, Receive, split
from .slots import ROOM_FOR_PARTS, SLOT, Parts, Slot, pack_slot
from .steps.fast_path import prepare
from .steps.layout import Origin, cut, lay_out
from .steps.run import Chunks, go_on, piece_of, run

if TYPE_CHECKING:
    from ..._core import StepsLayout, StepsRun

__all__ = ["NetworkEngine", "start"]

_NOTHING = np.empty(0, np.uint8)


def start(setup: EngineSetup) -> NetworkEngine:
    """The engine of a group whose members have nothing but their lane."""
    is_star, algorithm = setup.backend.topology == "star", setup.backend.options.algorithm
    return NetworkEngine(setup.lane, is_star=is_star, algorithm=algorithm)


class NetworkEngine(Engine):
    """Sends and receives over a lane.

    Args:
        is_star: Every rank is connected with rank 0 only, which passes on what the others have for each other.
        members: The ranks of the lane that take part, this one among them; roots and counts go by their order here.
            None: all.
        algorithm: The option of that name.
    """

    def __init__(
        self, lane: Lane, *, is_star: bool, members: Sequence[int] | None = None, algorithm: str | None = None
    ) -> None:
        rank, size = (lane.rank, lane.size) if members is None else (list(members).index(lane.rank), len(members))
        super().__init__(rank, size)
        self._lane = lane
        self._members = None if members is None else tuple(members)
        self._algorithm = algorithm
        self._topology = "star" if is_star else "mesh"
        self._overrides = parse_algorithms(algorithm or "")
        # Of all that belongs to a scatter of equal parts: how they come nobody knows before the slot is there.
        self._told = f"told {self._overrides.get('scatter', '')}"

    def among(self, members: Sequence[int]) -> NetworkEngine:
        """The same for some ranks of the lane."""
        return NetworkEngine(self._lane, is_star=False, members=members, algorithm=self._algorithm)

    # -- the fast path -------------------------------------------------------------------------------------------------

    def open_fast_path(self, maker: FastPathMaker) -> AnyFastPath | None:
        if self.size == 1 or self._members is not None or self._topology == "star":
            return None
        return maker.make_over_streams(
            self._lane, piece_of(self._lane), self._lay_out, self._go_on, self._take_scattered, self._run_whole
        )

    def _lay_out(self, verb: str, root: int, items: int, item: int) -> StepsLayout | None:
        """The layout of an operation on arrays of that size for the core; None if it goes the general way.

        Args:
            items: Elements of its largest array.
            item: Bytes of an element.
        """
        nbytes = items * item
        name = self._choose("scatter" if verb == "scatter_slot" else verb, nbytes)
        if name == "star":  # also where it is asked for: rank 0 passes on what the others have for each other
            return None
        family = self.rank, self.size, root
        also_reads: Sequence[int] = ()
        if verb == "scatter_slot":
            schedule = telling.hear(*family)
        elif verb == "scatter":
            schedule = telling.pass_on(*family)
            if nbytes > ROOM_FOR_PARTS:
                schedule = telling.with_slot(select.schedule(verb, name, self.rank, self.size, root=root), *family)
            also_reads = [recv.peer for step in telling.hear(*family).steps for recv in step.recvs]
        else:
            schedule = select.schedule(verb, name, self.rank, self.size, root=root, nbytes=nbytes)
        found = cut(verb, name, self.rank, self.size, root, items, item)
        salt = _salt(self._told if verb in ("scatter", "scatter_slot") else name)
        return lay_out(prepare(schedule), found, self._lane.plain_channels, salt, also_reads)

    def _go_on(self, running: RunningCollective, steps: StepsRun, origin: Origin, outcome: int) -> None:
        fingerprint = running.fingerprint ^ origin.salt
        fast_run = partial(origin.fast_run, steps)
        go_on(fast_run, outcome, self._lane, fingerprint, running.deadline, check_peers=running.check_peers)

    def _take_scattered(self, running: RunningCollective, out: Any, slot: bytes, root: int) -> None:
        """Takes this rank's part of a scatter of which the fast path has received the slot only.

        Raises:
            UsageError: The part does not fit `out`. The group can go on.
        """
        target = adapt(out, write=True)
        flat: Flat = target.array.reshape(-1)
        wrong: UsageError | None = None

        def receive(words: bytes) -> Flat:
            nonlocal wrong
            told = Description.parse(words, None)
            if (target.dtype, target.array.size) == (told.dtype, math.prod(told.shape)):
                return flat
            wrong = misfit(target.description, told, root)
            return np.empty(told.shape, told.numpy_dtype()).reshape(-1)

        self._take_part(running, np.frombuffer(slot, np.uint8), root, receive)
        if wrong is not None:
            raise wrong

    def _run_whole(self, running: RunningCollective, verb: str, x: Any, out: Any, root: int, op: str) -> None:
        """Runs a collective on plain arrays that the fast path has issued, but cannot begin.

        Args:
            verb: Any but a scatter.
        """
        if verb == "barrier":
            self.barrier(running)
            return
        written = {"all_reduce": True, "broadcast": self.rank != root, "reduce": self.rank == root}
        given = adapt(x, write=written.get(verb, False))
        flat = given.array.reshape(-1)
        target = None if out is None else adapt(out, write=True).array.reshape(-1)
        counts = [flat.size] * self.size
        if verb == "broadcast":
            self.broadcast(running, flat, root)
        elif verb == "all_reduce":
            self.all_reduce(running, flat, Reduction(op, given))
        elif verb == "reduce":
            self.reduce(running, flat, root, Reduction(op, given))
        elif verb == "gather":
            self.gather(running, flat, target, root, counts)
        else:
            assert target is not None
            if verb == "reduce_scatter":
                self.reduce_scatter(running, flat, target, Reduction(op, given))
            elif verb == "all_gather":
                self.all_gather(running, flat, target, counts)
            else:
                self.all_to_all(running, flat, target, np.full((self.size, self.size), flat.size // self.size))

    # -- the collectives -----------------------------------------------------------------------------------------------

    def _choose(self, operation: str, nbytes: int) -> str:
        return select.choose(operation, self.size, nbytes, topology=self._topology, overrides=self._overrides)

    def _run(
        self,
        running: RunningCollective,
        operation: str,
        name: str,
        chunks: Chunks,
        *,
        root: int = 0,
        nbytes: int = 0,
        reduction: Reduction | None = None,
        sources: Mapping[int, Flat] | None = None,
    ) -> None:
        schedule = select.schedule(operation, name, self.rank, self.size, root=root, nbytes=nbytes)
        self._follow(running, schedule, name, chunks, reduction=reduction, sources=sources)

    def _follow(
        self,
        running: RunningCollective,
        schedule: Schedule,
        name: str,
        chunks: Chunks,
        *,
        reduction: Reduction | None = None,
        sources: Mapping[int, Flat] | None = None,
    ) -> None:
        run(
            schedule if self._members is None else schedule.among(self._members),
            self._lane,
            chunks,
            # Ranks that were told to use different algorithms must not take each other's chunks for their own.
            running.fingerprint ^ _salt(name),
            running.deadline,
            dtype=reduction.dtype if reduction is not None else None,
            op=reduction.step if reduction is not None else "",
            sources=sources,
            check_peers=running.check_peers,
        )

    def barrier(self, running: RunningCollective) -> None:
        self._run(running, "barrier", self._choose("barrier", 0), (_NOTHING,))

    def broadcast(self, running: RunningCollective, flat: Flat, src: int) -> None:
        name = self._choose("broadcast", flat.nbytes)
        if name != "chain":
            self._run(running, "broadcast", name, (flat,), root=src)
            return
        parts = select.chain_pieces(flat.nbytes)
        chunks = [flat[start:stop] for start, stop in chunk_bounds(flat.size, parts)]
        self._run(running, "broadcast", name, chunks, root=src, nbytes=flat.nbytes)

    def all_reduce(self, running: RunningCollective, flat: Flat, reduction: Reduction) -> None:
        name = self._choose("all_reduce", flat.nbytes)
        chunks: Chunks = (flat,)
        if name not in ("doubling", "star"):  # those send it as a whole
            chunks = [flat[start:stop] for start, stop in chunk_bounds(flat.size, self.size)]
        reduction.begin_in_place(flat, self.size)
        self._run(running, "all_reduce", name, chunks, reduction=reduction)
        reduction.finish(flat, self.size)

    def reduce(self, running: RunningCollective, flat: Flat, dst: int, reduction: Reduction) -> None:
        name = self._choose("reduce", flat.nbytes)
        bounds = list(chunk_bounds(flat.size, select.chain_pieces(flat.nbytes) if name == "chain" else 1))
        target, sources = flat, {}
        if self.rank == dst:
            reduction.begin_in_place(flat, self.size)
        else:
            target, own = np.empty_like(flat), reduction.begin(flat, self.size)
            sources = {number: own[start:stop] for number, (start, stop) in enumerate(bounds)}
        chunks = [target[start:stop] for start, stop in bounds]
        self._run(running, "reduce", name, chunks, root=dst, nbytes=flat.nbytes, reduction=reduction, sources=sources)
        if self.rank == dst:
            reduction.finish(flat, self.size)

    def reduce_scatter(self, running: RunningCollective, source: Flat, target: Flat, reduction: Reduction) -> None:
        self.reduce_scatter_parts(running, list(source.reshape(self.size, target.size)), target, reduction)

    def reduce_scatter_parts(
        self, running: RunningCollective, parts: Sequence[Flat], target: Flat, reduction: Reduction
    ) -> None:
        """As `reduce_scatter`, of parts that may differ in length; part r has the same length on all ranks."""
        name = self._choose("reduce_scatter", sum(part.nbytes for part in parts))
        parts = [reduction.begin(part, self.size) for part in parts]
        if self.size == 1:
            target[:] = parts[0]
        chunks = {rank: np.empty_like(part) for rank, part in enumerate(parts)}  # the system gives what is used of it
        chunks[self.rank] = target
        self._run(running, "reduce_scatter", name, chunks, reduction=reduction, sources=dict(enumerate(parts)))
        reduction.finish(target, self.size)

    def all_gather(self, running: RunningCollective, source: Flat, target: Flat, counts: Sequence[int]) -> None:
        chunks = split(target, counts)
        chunks[self.rank][:] = source
        self._run(running, "all_gather", self._choose("all_gather", target.nbytes), chunks)

    def gather(
        self, running: RunningCollective, source: Flat, target: Flat | None, dst: int, counts: Sequence[int]
    ) -> None:
        name = self._choose("gather", source.itemsize * sum(counts))
        chunks: dict[int, Flat]
        if target is not None:
            chunks = dict(enumerate(split(target, counts)))
            chunks[self.rank][:] = source
        elif name == "star" and self.rank == 0:  # it passes them on
            chunks = {rank: np.empty(count, source.dtype) for rank, count in enumerate(counts)}
            chunks[0] = source
        else:
            chunks = {self.rank: source}
        self._run(running, "gather", name, chunks, root=dst)

    def scatter(
        self, running: RunningCollective, source: Flat | None, target: Flat, src: int, counts: Sequence[int]
    ) -> None:
        name = self._choose("scatter", target.itemsize * sum(counts))
        chunks: dict[int, Flat] = {self.rank: target}
        if source is not None:
            chunks = dict(enumerate(split(source, counts)))
            target[:] = chunks[self.rank]
        else:
            chunks |= {rank: np.empty(counts[rank], target.dtype) for rank in self._below(name, src)}
        self._run(running, "scatter", name, chunks, root=src)

    def _below(self, name: str, src: int) -> Sequence[int]:
        """The ranks whose parts of a scatter this one, which is not the root, passes on."""
        if name == "star":
            return range(1, self.size) if self.rank == 0 else ()
        return tree.below(self.rank, self.size, src) if name == "tree" else ()

    def scatter_equal(self, running: RunningCollective, parts: Parts | None, src: int, receive: Receive) -> None:
        if self._topology == "star":
            super().scatter_equal(running, parts, src, receive)
            return
        if parts is None:
            slot = np.empty(SLOT, np.uint8)
            self._follow(running, telling.hear(self.rank, self.size, src), self._told, {self.size: slot})
            self._take_part(running, slot, src, receive)
            return
        own = np.split(parts.flat, self.size)
        slot = pack_slot(parts, self.size)
        self._tell(running, slot, src, parts.description)
        receive(parts.description)[:] = own[self.rank]
        if not Slot(slot, self.size).parts_inside:
            self._scatter_told(running, dict(enumerate(own)), parts.flat.nbytes, src)

    def _take_part(self, running: RunningCollective, slot: npt.NDArray[np.uint8], root: int, receive: Receive) -> None:
        """All that is left to do for a scatter of equal parts on a rank that has heard the slot."""
        told = Slot(slot, self.size)
        target = receive(self._tell(running, slot, root))
        if told.parts_inside:
            target.view(np.uint8)[:] = told.part_of(self.rank)
            return
        nbytes = target.nbytes * self.size
        below = self._below(self._choose("scatter", nbytes), root)
        chunks: dict[int, Flat] = {rank: np.empty(target.nbytes, np.uint8) for rank in below}
        self._scatter_told(running, {**chunks, self.rank: target}, nbytes, root)

    def _tell(self, running: RunningCollective, slot: Flat, root: int, words: bytes = b"") -> bytes:
        """Passes the slot on, and the description of a part with it, which it returns; on the root that is `words`."""
        self._follow(running, telling.pass_on(self.rank, self.size, root), self._told, {self.size: slot})
        told = Slot(slot, self.size)
        if told.words is not None:
            return told.words
        text = bytearray(words or bytes(told.words_length))
        self._follow(running, tree.broadcast(self.rank, self.size, root), self._told, (np.frombuffer(text, np.uint8),))
        return bytes(text)

    def _scatter_told(self, running: RunningCollective, chunks: dict[int, Flat], nbytes: int, root: int) -> None:
        schedule = select.schedule("scatter", self._choose("scatter", nbytes), self.rank, self.size, root=root)
        self._follow(running, schedule, self._told, chunks)

    def scan(self, running: RunningCollective, flat: Flat, reduction: Reduction, *, exclusive: bool) -> None:
        if self._topology == "star" or select.scans_by_parts(self.size, flat.nbytes):
            super().scan(running, flat, reduction, exclusive=exclusive)
            return
        if exclusive:
            chunks = {self.rank: flat.copy(), self.rank - 1: flat}
            self._follow(running, scan.pass_on(self.rank, self.size), "pass_on", chunks)
        schedule = scan.inclusive(self.rank, self.size, 1 if exclusive else 0)
        self._follow(running, schedule, "doubling", (flat,), reduction=reduction)

    def all_to_all(self, running: RunningCollective, source: Flat, target: Flat, sizes: npt.NDArray[np.int64]) -> None:
        size, rank = self.size, self.rank
        rows = sizes.tolist()
        name = self._choose("all_to_all", sum(map(sum, rows)) * source.itemsize // size)
        outgoing = split(source, rows[rank])
        incoming = split(target, [row[rank] for row in rows])
        incoming[rank][:] = outgoing[rank]
        chunks = {rank * size + j: outgoing[j] for j in range(size) if j != rank}
        chunks |= {i * size + rank: incoming[i] for i in range(size) if i != rank}
        passing: Sequence[int] | frozenset[int] = ()
        if name == "star" and rank == 0:
            passing = [i * size + j for i in range(1, size) for j in range(1, size) if i != j]
        elif name == "bruck":
            passing = bruck.passing(rank, size)
        chunks |= {chunk: np.empty(rows[chunk // size][chunk % size], source.dtype) for chunk in passing}
        self._run(running, "all_to_all", name, chunks)


@lru_cache
def _salt(name: str) -> int:
    """A number for an algorithm."""
    return zlib.crc32(name.encode())
