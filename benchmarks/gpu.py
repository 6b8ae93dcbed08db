"""Collectives among ranks that share one GPU: Phalanx beside Gloo on CUDA tensors and torch's symmetric memory.

    python benchmarks/gpu.py [--ranks 2 4] [--sizes 4 65536 1048576 67108864 268435456] [--verbs all_reduce ...]
        [--contenders phalanx torch-phalanx gloo symmetric nccl] [--seconds 0.3] [--load]

Synchronous calls, the host waits after each; the median of all ranks' slowest, and rank 0's longest call. Results are
checked before they are timed. `--load` keeps a kernel of each rank running on another stream; the ranks then meet
before each call, so that only the call is timed. What a contender refuses is shown as "-", with its words: NCCL refuses
two ranks on one GPU, and Gloo some verbs on CUDA tensors. "ring" is a message to the next rank and one from the rank
before, "message" one from rank 0 to rank 1 or back, half of both. Gloo has no messages of CUDA tensors: it takes them,
passes their addresses to the kernel's `writev` and ends with "Bad address".
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import deque
from typing import Any

import click
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

VERBS = [
    *("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"),
    *("reduce", "gather", "scatter", "ring", "message"),
]
CONTENDERS = ["phalanx", "torch-phalanx", "gloo", "symmetric", "nccl"]
SIZES = [4, 65536, 1 << 20, 64 << 20, 256 << 20]


def main() -> None:
    """Runs the contenders one after another, in the same processes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--verbs", nargs="+", default=["all_reduce"], choices=VERBS)
    parser.add_argument("--contenders", nargs="+", default=["phalanx", "gloo", "symmetric"], choices=CONTENDERS)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--load", action="store_true")
    arguments = parser.parse_args()
    click.echo(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; µs per call")
    for ranks in arguments.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(rank_of, (ranks, arguments, folder), nprocs=ranks)


def rank_of(rank: int, ranks: int, arguments: Any, folder: str) -> None:
    """One rank; rank 0 shows the results."""
    torch.cuda.set_device(0)
    meeting = Meeting(f"{folder}/meeting", rank, ranks) if arguments.load else None
    for contender in arguments.contenders:
        for verb, size, median, more in rows_of(contender, rank, ranks, arguments, folder, meeting):
            shown = f"{median * 1e6:12,.1f}" if median else "           -"
            if rank == 0:
                click.echo(f"{contender:14} {ranks} ranks  {verb:15} {size:>11,} B {shown}   ({more})")


def rows_of(
    contender: str, rank: int, ranks: int, arguments: Any, folder: str, meeting: Meeting | None
) -> list[tuple[str, int, float, str]]:
    """The results of one contender."""
    backend = {"torch-phalanx": "phalanx", "nccl": "cpu:gloo,cuda:nccl"}.get(contender, "gloo")
    dist.init_process_group(backend, init_method=f"file://{folder}/{contender}", rank=rank, world_size=ranks)
    close = dist.barrier
    if contender == "phalanx":
        import phalanx as px

        os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(rank), WORLD_SIZE=str(ranks))
        port = [None]
        if rank == 0:
            import socket

            with socket.create_server(("127.0.0.1", 0)) as found:
                port[0] = found.getsockname()[1]
        dist.broadcast_object_list(port)
        os.environ["MASTER_PORT"] = str(port[0])
        group = px.init()
        calls, close = of_group(group), group.close
    else:
        calls = of_symmetric() if contender == "symmetric" else of_torch()
    if contender == "gloo":
        del calls["ring"], calls["message"]
    load = None if meeting is None else Load(meeting)
    rows: list[tuple[str, int, float, str]] = []
    for verb in arguments.verbs:
        for size in arguments.sizes:
            if verb not in calls:
                continue
            try:
                rows.append((verb, size, *measured(calls[verb], verb, rank, ranks, size, arguments.seconds, load)))
            except RuntimeError as error:  # on all ranks, before anything was moved
                rows.append((verb, size, 0.0, _words(error)))
                break
    torch.cuda.synchronize()
    if contender == "phalanx":
        close()
    dist.destroy_process_group()
    return rows


class Meeting:
    """A place in shared memory where the ranks of a host wait for each other, within a microsecond or two."""

    def __init__(self, path: str, rank: int, ranks: int) -> None:
        with open(path, "ab") as file:
            file.truncate(8 * ranks)
        self._counts = np.memmap(path, np.int64, "r+", shape=(ranks,))
        self._rank = rank

    def meet(self) -> None:
        """Returns when all have come."""
        self._counts[self._rank] += 1
        while self._counts.min() < self._counts[self._rank]:
            pass


class Load:
    """Keeps the multiprocessors busy."""

    def __init__(self, meeting: Meeting) -> None:
        self.meet = meeting.meet
        self._stream = torch.cuda.Stream()
        self._x = torch.randn(4096, 4096, device="cuda")
        self._added: deque[Any] = deque()

    def add(self) -> None:
        """Puts some more on its stream, unless enough is there: all of it is waited for at the end."""
        while self._added and self._added[0].query():
            self._added.popleft()
        if len(self._added) > 2:
            return
        with torch.cuda.stream(self._stream):
            for _ in range(3):
                self._x = (self._x @ self._x).clamp_(-1, 1)
            self._added.append(self._stream.record_event())


def measured(call: Any, verb: str, rank: int, ranks: int, size: int, seconds: float, load: Load | None) -> Any:
    """`size` is the bytes of the larger of the two arrays; of each of them where they are alike."""
    count = max(1, size // 4)
    large = ranks * max(1, count // ranks)
    x = torch.full((large,), rank + 1.0, device="cuda")
    part = torch.full((large // ranks,), rank + 1.0, device="cuda")
    out = torch.empty_like(x)
    args = {
        "all_gather": (out, part),
        "reduce_scatter": (part, x),
        "all_to_all": (out, x),
        "gather": (out, part),
        "scatter": (part, x),
        "ring": (out, x),
        "message": (out, x),
    }.get(verb, (x,))
    call = call(*args)
    call()
    torch.cuda.synchronize()
    total = ranks * (ranks + 1) / 2
    result = (args[0])[-1].item()
    expected = {"all_gather": ranks, "all_to_all": ranks, "broadcast": 1.0, "scatter": 1.0, "gather": ranks}.get(
        verb, total
    )
    if verb == "ring":
        expected = (rank - 1) % ranks + 1.0
    if verb == "message":
        expected = 2.0 - rank
    if rank == 0 or (verb not in ("reduce", "gather") and (rank == 1 or verb != "message")):
        assert result == expected, f"{verb}: {result} (expected {expected})"
    x.zero_()
    times: list[float] = []
    before = time.perf_counter()
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    slow = torch.tensor([time.perf_counter() - before > 0.15], dtype=torch.int32)
    dist.all_reduce(slow, dist.ReduceOp.MAX)
    stream = torch.cuda.current_stream()  # to ask for it takes longer than some calls
    begin = time.perf_counter()
    rounds = 2 if slow.item() else 8
    while True:
        for _ in range(rounds):
            if load is not None:
                load.add()
                load.meet()
            before = time.perf_counter()
            call()
            stream.synchronize()  # not all of the GPU, which other processes use
            times.append(time.perf_counter() - before)
        over = torch.tensor([time.perf_counter() - begin > seconds or len(times) > 3000], dtype=torch.int32)
        dist.all_reduce(over, dist.ReduceOp.MAX)
        if over.item():
            break
    torch.cuda.synchronize()
    median = torch.tensor([statistics.median(times)])
    dist.all_reduce(median, dist.ReduceOp.MAX)
    return median.item() / (2 if verb == "message" else 1), f"{len(times)} calls, the longest {max(times) * 1e6:,.0f}"


def _words(error: Exception) -> str:
    """What a contender says of a call that it does not take, in one line."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "Duplicate" in line or "support" in line.lower()]
    return " ".join((telling or lines)[0].split())[:160]


def there_and_back(rank: int, send: Any, recv: Any) -> Any:
    """A call that sends a message from rank 0 to rank 1 and one back; nothing on other ranks."""

    def first() -> None:
        send(1)
        recv(1)

    def second() -> None:
        recv(0)
        send(0)

    return [first, second][rank] if rank < 2 else lambda: None


def of_group(group: Any) -> dict[str, Any]:
    """The verbs of a group of Phalanx."""
    rank, ranks = group.rank, group.world_size
    first, after, before = rank == 0, (rank + 1) % ranks, (rank - 1) % ranks
    return {
        "all_reduce": lambda x: lambda: group.all_reduce(x),
        "all_gather": lambda out, x: lambda: group.all_gather(x, out),
        "reduce_scatter": lambda out, x: lambda: group.reduce_scatter(x, "sum", out),
        "broadcast": lambda x: lambda: group.broadcast(x, 0),
        "all_to_all": lambda out, x: lambda: group.all_to_all(x, out),
        "reduce": lambda x: lambda: group.reduce(x, 0),
        "gather": lambda out, x: lambda: group.gather(x, 0, out if first else None),
        "scatter": lambda out, x: lambda: group.scatter(x if first else None, 0, out),
        "ring": lambda out, x: lambda: group.sendrecv(x, after, out, before),
        "message": lambda out, x: there_and_back(rank, lambda to: group.send(x, to), lambda src: group.recv(out, src)),
    }


def of_torch() -> dict[str, Any]:
    """The functions of torch.distributed, on the backend of the default group."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    rank, ranks = dist.get_rank(), dist.get_world_size()
    first, after, before = rank == 0, (rank + 1) % ranks, (rank - 1) % ranks

    def ring(out: Any, x: Any) -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, out, before)]):
            work.wait()

    return {
        "all_reduce": lambda x: lambda: dist.all_reduce(x),
        "all_gather": lambda out, x: lambda: gather(out, x),
        "reduce_scatter": lambda out, x: lambda: reduce_scatter(out, x),
        "broadcast": lambda x: lambda: dist.broadcast(x, 0),
        "all_to_all": lambda out, x: lambda: dist.all_to_all_single(out, x),
        "reduce": lambda x: lambda: dist.reduce(x, 0),
        "gather": lambda out, x: lambda: dist.gather(x, list(out.chunk(ranks)) if first else None, 0),
        "scatter": lambda out, x: lambda: dist.scatter(out, list(x.chunk(ranks)) if first else None, 0),
        "ring": lambda out, x: lambda: ring(out, x),
        "message": lambda out, x: there_and_back(rank, lambda to: dist.send(x, to), lambda src: dist.recv(out, src)),
    }


def of_symmetric() -> dict[str, Any]:
    """What torch's symmetric memory has, with several ranks on one GPU allowed."""
    import torch.distributed._symmetric_memory as symmetric

    name = dist.group.WORLD.group_name
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    symmetric.enable_symm_mem_for_group(name)

    def all_reduce(x: Any) -> Any:
        shared = symmetric.empty(x.numel(), dtype=x.dtype, device=x.device)
        symmetric.rendezvous(shared, name)
        shared.copy_(x)

        def call() -> None:
            torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", name)

        def first() -> None:
            call()
            x.copy_(shared)
            first.done = True  # type: ignore[attr-defined]

        return lambda: call() if hasattr(first, "done") else first()

    return {"all_reduce": all_reduce}


if __name__ == "__main__":
    main()
