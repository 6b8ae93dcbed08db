"""A rank that times calls of torch.distributed on Phalanx, beside the calls of Phalanx below them."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["ASYNCHRONOUS", "BARE", "FLOOR", "SYNCHRONOUS", "run_rank"]

Call = Callable[..., Any]

BARE, SYNCHRONOUS, ASYNCHRONOUS = "bare", "synchronous", "asynchronous"
FLOOR = " floor"
"""Added to a way: that of the process group that does nothing."""
_MESSAGE = "send and recv"
_WARM_UP = 200


class _NothingWork(dist.Work):  # type: ignore[misc]
    def wait(self, timeout: Any = None) -> bool:
        return True


class _NothingGroup(dist.ProcessGroup):  # type: ignore[misc]
    """A process group in Python whose operations are done at once: what remains is what torch itself takes."""

    def getBackendName(self) -> str:  # noqa: N802
        return "nothing"

    def _nothing(self, *args: Any, **kwargs: Any) -> Any:
        return _NothingWork()

    allreduce = broadcast = barrier = send = recv = _nothing
    all_gather_single = reduce_scatter_single = _allgather_base = _reduce_scatter_base = _nothing


def _either(new: str, old: str) -> Any:
    """A function that newer versions of torch have under another name; there the old one warns."""
    return getattr(dist, new, None) or getattr(dist, old)


def _calls_of_torch(rank: int, size: int, nbytes: int) -> dict[str, dict[str, Call]]:
    """By operation: the call that waits, and the call that is waited for at once."""
    x, peer = torch.zeros(max(nbytes // 4, 1)), 1 - rank
    y, whole = torch.zeros_like(x), torch.zeros(size * len(x))
    gather = _either("all_gather_single", "all_gather_into_tensor")
    scatter = _either("reduce_scatter_single", "reduce_scatter_tensor")
    collectives: dict[str, Call] = {
        "all_reduce": partial(dist.all_reduce, x),
        "broadcast": partial(dist.broadcast, x, 0),
        "all_gather_into_tensor": partial(gather, whole, x),
        "reduce_scatter_tensor": partial(scatter, x, whole),
        "barrier": dist.barrier,
    }

    def in_turn(send: Call, receive: Call) -> Call:
        first, second = (send, receive) if rank == 0 else (receive, send)

        def there_and_back() -> None:
            first()
            second()

        return there_and_back

    def exchange() -> None:
        operations = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, y, peer)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    calls: dict[str, dict[str, Call]] = {
        name: {SYNCHRONOUS: call, ASYNCHRONOUS: partial(_waited_for, partial(call, async_op=True))}
        for name, call in collectives.items()
    }
    calls[_MESSAGE] = {
        SYNCHRONOUS: in_turn(partial(dist.send, x, peer), partial(dist.recv, y, peer)),
        ASYNCHRONOUS: in_turn(
            partial(_waited_for, partial(dist.isend, x, peer)), partial(_waited_for, partial(dist.irecv, y, peer))
        ),
    }
    calls["batch_isend_irecv"] = {ASYNCHRONOUS: exchange}
    return calls


def _waited_for(call: Call) -> None:
    call().wait()


def _bare_calls(group: Any, nbytes: int) -> dict[str, Call]:
    """The same operations of a group of Phalanx."""
    x, peer = torch.zeros(max(nbytes // 4, 1)).numpy(), 1 - group.rank
    y, whole = x.copy(), torch.zeros(group.world_size * len(x)).numpy()

    def there_and_back() -> None:
        if group.rank == 0:
            group.send(x, peer)
            group.recv(y, peer)
        else:
            group.recv(y, peer)
            group.send(x, peer)

    return {
        "all_reduce": partial(group.all_reduce, x),
        "broadcast": partial(group.broadcast, x, 0),
        "all_gather_into_tensor": partial(group.all_gather, x, whole),
        "reduce_scatter_tensor": partial(group.reduce_scatter, whole, out=x),
        "barrier": group.barrier,
        _MESSAGE: there_and_back,
        "batch_isend_irecv": partial(group.sendrecv, x, peer, y, peer),
    }


def _seconds(call: Call, count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - began) / count


def run_rank(nbytes: int, rounds: int, calls: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each operation, by round: bare, under torch, and of a process group that does nothing."""
    torch.set_num_threads(1)
    make: Callable[..., Any] = lambda store, rank, size, timeout: _NothingGroup(rank, size)  # noqa: E731
    dist.Backend.register_backend("nothing", make, devices=["cpu"])
    dist.init_process_group("phalanx")
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.distributed_c10d._get_default_group().group
    made = _calls_of_torch(rank, size, nbytes)
    for name, call in _bare_calls(group, nbytes).items():
        made[name] = {BARE: call, **made[name]}
    found: dict[str, dict[str, list[float]]] = {}
    for name, ways in made.items():
        times: dict[str, list[float]] = {way: [] for way in ways}
        found[name] = times
        for call in ways.values():
            _seconds(call, _WARM_UP)
        for _ in range(rounds):
            for way, call in ways.items():
                group.barrier()
                # There and back is two messages.
                times[way].append(_seconds(call, calls) / (2 if name == _MESSAGE else 1))
    dist.destroy_process_group()
    dist.init_process_group("nothing", store=dist.HashStore(), rank=rank, world_size=size)
    for name, ways in _calls_of_torch(rank, size, nbytes).items():
        for way, call in ways.items():
            _seconds(call, _WARM_UP)
            found[name][way + FLOOR] = [_seconds(call, calls) for _ in range(rounds)]
    return found
