"""Collectives on a real GPU that the ranks share: torch, CuPy and JAX, all verbs, beside the results of the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.gpu.gpu import needs_gpu

import phalanx as px
from phalanx.testing import run_ranks

torch = pytest.importorskip("torch")
pytestmark = needs_gpu

SIZES = [1, 1000, 100_003, 4 << 20]
DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
]


def bits(x: Any) -> bytes:
    x = x.detach().cpu().contiguous().reshape(-1)
    return bytes(x.view(torch.uint8).numpy().tobytes())


def numbers(rank: int, count: int, dtype: Any) -> Any:
    made = torch.from_numpy((np.random.default_rng(rank).random(count) * 7 - 2).astype(np.float64))
    if dtype == torch.bool:
        return made > 0
    if dtype.is_complex:
        return torch.complex(made, made.flip(0)).to(dtype)
    return made.abs().to(dtype) if not dtype.is_signed else made.to(dtype)


def reductions(group: px.Group, sizes: list[int], dtypes: list[str]) -> list[str]:
    from phalanx._native import valid_ops

    wrong = []
    for name in dtypes:
        dtype = getattr(torch, name)
        for count in sizes:
            host = numbers(group.rank, count, dtype)
            for op in valid_ops(name):
                x, expected = host.cuda(), host.clone()
                assert group.all_reduce(x, op) is x
                group.all_reduce(expected, op)
                if bits(x) != bits(expected):
                    wrong.append(f"all_reduce {name} {count} {op}")
    return wrong


@pytest.mark.parametrize("ranks", [2, 3])
def test_reductions_have_the_bits_of_the_host(ranks: int) -> None:
    assert run_ranks(ranks, reductions, [5, 100_003], DTYPES, backend="mesh", timeout=200) == [[]] * ranks


def verbs(group: px.Group, count: int, name: str) -> list[str]:
    dtype, rank, size = getattr(torch, name), group.rank, group.world_size
    wrong = []

    def check(what: str, found: Any, expected: Any) -> None:
        if not found.is_cuda or bits(found) != bits(expected):
            wrong.append(f"{what} {name} {count}")

    movable = torch.arange(count * size, dtype=torch.int32).add(rank).remainder(120).to(torch.uint8).view(torch.uint8)
    every = numbers(rank, count * size, dtype) if name != "float8_e4m3fn" else movable.view(dtype)
    part = every[:count]
    x = every.cuda()
    check("broadcast", group.broadcast(x, 1), group.broadcast(every.clone().view(_movable(every)), 1))
    plain = every.view(_movable(every))
    check("all_gather", group.all_gather(part.cuda()), group.all_gather(plain[: part.numel()].clone()))
    found, expected = group.gather(part.cuda(), 1), group.gather(plain[: part.numel()].clone(), 1)
    if rank == 1:
        check("gather", found, expected)
    check(
        "scatter", group.scatter(every.cuda() if rank == 0 else None, 0), group.scatter(plain if rank == 0 else None, 0)
    )
    check("all_to_all", group.all_to_all(every.cuda()), group.all_to_all(plain.clone()))
    counts = [(rank + other) % 3 * count // 3 for other in range(size)]
    taken = sum(counts)
    check(
        "all_to_all counts",
        group.all_to_all(every[:taken].cuda(), send_counts=counts),
        group.all_to_all(plain[:taken].clone(), send_counts=counts),
    )
    if name != "float8_e4m3fn":
        check("reduce_scatter", group.reduce_scatter(every.cuda()), group.reduce_scatter(every.clone()))
        x, host = every.cuda(), every.clone()
        group.reduce(x, 1)
        group.reduce(host, 1)
        check("reduce", x, host)
        strided = every.reshape(size, -1).t().cuda()
        check("not contiguous", group.all_reduce(strided), group.all_reduce(every.reshape(size, -1).t().contiguous()))
        check("scan", group.scan(every.cuda()), group.scan(every.clone()))
        many = group.all_reduce_many([every.cuda(), part.cuda()])
        check("all_reduce_many", many[1], group.all_reduce(part.clone()))
    after = group.sendrecv(part.cuda(), (rank + 1) % size, None, (rank - 1) % size)
    check("sendrecv", after, group.sendrecv(plain[: part.numel()].clone(), (rank + 1) % size, None, (rank - 1) % size))
    return wrong


def _movable(x: Any) -> Any:
    return torch.uint8 if x.dtype == torch.float8_e4m3fn else x.dtype


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int64", "float8_e4m3fn"])
def test_verbs(name: str, transport: str) -> None:
    for count in [3, 30_001, 1 << 20]:
        assert run_ranks(2, verbs, count, name, backend="mesh", options=px.Options(transport=transport)) == [[]] * 2


def streams(group: px.Group) -> list[float]:
    """What a stream computes before the call is what is sent, and what it computes after is what was received."""
    found = []
    for side in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(side):
            for count in (1000, 1 << 22):
                big = torch.randn(4096, 4096, device="cuda")
                for _ in range(20):
                    big = (big @ big).clamp_(-1, 1)
                x = torch.full((count,), 1.0, device="cuda") + 0 * big.sum()
                y = group.all_reduce(x) * 2
                work = group.all_reduce(x * 1, async_op=True)
                found += [y.min().item(), y.max().item(), work.wait().max().item()]
    return found


def test_streams() -> None:
    assert run_ranks(2, streams, backend="mesh") == [[4.0, 4.0, 4.0] * 4] * 2


def scatters(group: px.Group, on_host: list[int]) -> list[str]:
    """From each root, to parts on the GPU, or on the host where `on_host` says so."""
    wrong, size = [], group.world_size
    device = "cpu" if group.rank in on_host else "cuda"
    for turn in range(2):
        for count in SIZES:
            for root in range(size):
                whole = numbers(root + turn, count * size, torch.float32).to("cpu" if root in on_host else "cuda")
                out = torch.zeros(count, device=device)
                assert group.scatter(whole if group.rank == root else None, root, out) is out
                if bits(out) != bits(whole.chunk(size)[group.rank]):
                    wrong.append(f"{count} from rank {root}, turn {turn}")
    return wrong


@pytest.mark.parametrize("config", ["", "expandable_segments:True"])
@pytest.mark.parametrize("on_host", [[], [1]])
def test_scatters(on_host: list[int], config: str) -> None:
    env = {"PYTORCH_CUDA_ALLOC_CONF": config} if config else {}
    assert run_ranks(3, scatters, on_host, backend="mesh", env=env) == [[]] * 3


@pytest.mark.parametrize("count", [100_003, 4 << 20])
def test_verbs_on_memory_that_others_cannot_open(count: int) -> None:
    env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert run_ranks(3, verbs, count, "float32", backend="mesh", env=env) == [[]] * 3


def messages(group: px.Group, agrees: bool) -> list[str]:
    """Messages of all lengths in a ring, by `sendrecv` and by asynchronous ones, to the GPU and to the host."""
    wrong, rank, size = [], group.rank, group.world_size
    after, before = (rank + 1) % size, (rank - 1) % size
    if agrees:
        group.all_reduce(torch.ones(1, device="cuda"))
    for turn in range(3):
        for count in SIZES:
            for name in ("float32", "bfloat16"):
                dtype = getattr(torch, name)
                x, expected = (numbers(r + turn, count, dtype) for r in (rank, before))
                for device in ("cuda", "cpu"):
                    out = torch.zeros(count, dtype=dtype, device=device)
                    assert group.sendrecv(x.cuda(), after, out, before) is out
                    coming, going = group.irecv(None, before), group.isend(x.cuda(), after)
                    found = coming.wait()
                    going.wait()
                    if bits(out) != bits(expected) or bits(found) != bits(expected):
                        wrong.append(f"{count} {name} to {device}, turn {turn}")
    return wrong


@pytest.mark.parametrize("agrees", [True, False])
@pytest.mark.parametrize("config", ["", "expandable_segments:True"])
def test_messages(config: str, agrees: bool) -> None:
    env = {"PYTORCH_CUDA_ALLOC_CONF": config} if config else {}
    assert run_ranks(3, messages, agrees, backend="mesh", env=env) == [[]] * 3


def gives_up(group: px.Group) -> list[Any]:
    """A sender whose deadline passes changes its tensor; the receiver comes too late."""
    x = torch.full((1 << 20,), float(group.rank), device="cuda")
    group.all_reduce(torch.ones(1, device="cuda"))
    if group.rank == 0:
        try:
            group.send(x, 1, timeout=0.3)
        except px.Timeout:
            x.fill_(7)
            torch.cuda.synchronize()
            group.send_object("gave up", 1, tag=1)
        group.send(x, 1)
        return []
    found: list[Any] = [group.recv_object(0, tag=1)]
    try:
        group.recv(x, 0)
    except px.ChannelClosed as error:
        found.append("gave up sending" in str(error))
    group.recv(x, 0)
    return [*found, x.unique().tolist()]


def test_a_sender_that_gives_up() -> None:
    assert run_ranks(2, gives_up, backend="mesh")[1] == ["gave up", True, [7.0]]


def reused_memory(group: px.Group) -> list[str]:
    """The allocator hands memory out again: freed and cached, and freed for good."""
    wrong = []
    for step in range(30):
        x = torch.full((300_000 + 70_000 * (step % 5),), float(step + group.rank), device="cuda")
        group.all_reduce(x)
        if x.unique().tolist() != [2.0 * step + 1]:
            wrong.append(f"step {step}")
        del x
        if step % 7 == 3:
            torch.cuda.empty_cache()
    return wrong


@pytest.mark.parametrize("config", ["", "expandable_segments:True"])
def test_memory_that_is_used_again(config: str) -> None:
    env = {"PYTORCH_CUDA_ALLOC_CONF": config} if config else {}
    assert run_ranks(2, reused_memory, backend="mesh", env=env) == [[]] * 2


def refuses_capture(group: px.Group) -> str:
    x = torch.ones(10, device="cuda")
    group.all_reduce(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            group.all_reduce(x)
    except px.UsageError as error:
        return str(error)
    return ""


def test_a_graph_cannot_hold_one() -> None:
    for text in run_ranks(2, refuses_capture, backend="mesh"):
        assert "captured for a CUDA graph" in text


def with_cupy(group: px.Group) -> list[float]:
    import cupy

    found = []
    for count in (10, 1 << 20):
        x = cupy.full(count, group.rank + 1, cupy.float32)
        assert group.all_reduce(x) is x
        gathered = group.all_gather(x)
        assert isinstance(gathered, cupy.ndarray)
        found += [float(x[-1]), float(gathered.sum() / count)]
        y = cupy.arange(count, dtype=cupy.float32).reshape(2, -1).T
        group.all_reduce(y)
        found.append(float(y[1, 0]))
    return found


def test_cupy() -> None:
    pytest.importorskip("cupy")
    assert run_ranks(2, with_cupy, backend="mesh") == [[3.0, 6.0, 2.0] * 2] * 2


def with_jax(group: px.Group) -> list[float]:
    import jax

    found = []
    for count in (10, 1 << 20):
        x = jax.numpy.full(count, group.rank + 1.0)
        assert x.devices().pop().platform in ("gpu", "cuda"), jax.devices()
        y = group.all_reduce(x)
        assert float(x[0]) == group.rank + 1
        found += [float(y[-1]), float(group.all_gather(x).sum() / count)]
        z = group.all_reduce(x.astype(jax.numpy.bfloat16))
        found.append(float(z[0]))
    return found


def test_jax() -> None:
    pytest.importorskip("jax")
    env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_PLATFORMS": "cuda"}
    assert run_ranks(2, with_jax, backend="mesh", env=env) == [[3.0, 3.0, 3.0] * 2] * 2


def pipeline(group: px.Group) -> list[float]:
    """The losses of a model whose layers are spread over the ranks, on the GPU."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Linear(32, 32), torch.nn.Linear(32, 4)]
    model = torch.nn.Sequential(*layers).cuda()
    x, y = torch.randn(2, 16, 32).cuda(), torch.randn(16, 4).cuda()
    made = px.parallel.Pipeline(model, group, microbatches=4)
    optimizer = torch.optim.SGD(made.parameters(), 0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(round(made.step(x[0], y, torch.nn.functional.mse_loss).item(), 5))
        optimizer.step()
    assert all(parameter.grad.is_cuda for parameter in made.parameters())
    return losses


def test_pipelines() -> None:
    (alone,) = run_ranks(1, pipeline, backend="mesh")
    assert len(set(alone)) == 3
    assert run_ranks(2, pipeline, backend="mesh") == [alone] * 2


def under_torch(group: px.Group, folder: str) -> list[Any]:
    """What torch's functions do with CUDA tensors, asynchronous ones and messages among them."""
    import torch.distributed as dist

    dist.init_process_group(
        "phalanx", init_method=f"file://{folder}/store", rank=group.rank, world_size=group.world_size
    )
    rank, size, found = dist.get_rank(), dist.get_world_size(), []
    for count in (3, 1_000_000):
        x, out = torch.full((size, count), float(rank), device="cuda"), torch.zeros(count, device="cuda")
        dist.scatter(out, list(x + torch.arange(size, device="cuda")[:, None]) if rank == 1 else None, 1)
        found.append(out.unique().tolist())
        works = [dist.all_reduce(x, async_op=True), dist.broadcast(out, 0, async_op=True)]
        for work in works:
            work.wait()
        found += [x.unique().tolist(), out.unique().tolist()]
        ring = [dist.P2POp(dist.isend, out + rank, (rank + 1) % size), dist.P2POp(dist.irecv, x[0], (rank - 1) % size)]
        for work in dist.batch_isend_irecv(ring):
            work.wait()
        found.append(x[0].unique().tolist())
    dist.destroy_process_group()
    return found


def test_under_torch(tmp_path: Any) -> None:
    for rank, found in enumerate(run_ranks(3, under_torch, str(tmp_path), backend="mesh")):
        assert found == [[1.0 + rank], [3.0], [1.0], [1.0 + (rank - 1) % 3]] * 2


def shared_memory(group: px.Group) -> list[Any]:
    x = group.empty((3, 1 << 18), np.float32, device="cuda")
    x.fill_(group.rank + 1)
    group.all_reduce(x)
    half = group.empty(5, np.float16, device="cuda:0")
    half.zero_()
    return [x.shape, x.unique().tolist(), str(x.device), str(half.dtype)]


@pytest.mark.parametrize("config", ["", "expandable_segments:True"])
def test_memory_of_the_group(config: str) -> None:
    env = {"PYTORCH_CUDA_ALLOC_CONF": config} if config else {}
    expected = [torch.Size([3, 1 << 18]), [3.0], "cuda:0", "torch.float16"]
    assert run_ranks(2, shared_memory, backend="mesh", env=env) == [expected] * 2
