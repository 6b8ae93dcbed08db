"""torch's modules, optimizers and DTensors, and its own checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from tests.torch_backend.support import together  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor  # noqa: E402

import phalanx as px  # noqa: E402

DTYPES = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128 float8_e5m2".split()  # noqa: SIM905


def trained(seed: int, steps: int = 1) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def test_tensors_of_all_dtypes(tmp_path: Path) -> None:
    tree = {name: torch.arange(6).reshape(2, 3).to(getattr(torch, name)) for name in DTYPES}
    tree |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4), "parameter": torch.nn.Parameter(torch.ones(2))}
    tree |= {"turned": torch.arange(6).reshape(2, 3).T, "conjugate": torch.tensor([1 + 2j]).conj()}
    px.checkpoint.save(tmp_path / "a", tree)
    found = px.checkpoint.load(tmp_path / "a")
    for name, tensor in tree.items():
        assert isinstance(found[name], torch.Tensor)
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name].to(torch.complex128), tensor.detach().to(torch.complex128))


@pytest.mark.parametrize("ranks", [1, 3])
def test_many_small_tensors_of_all_kinds(tmp_path: Path, ranks: int) -> None:
    """They are copied together, by dtype; derived classes, large ones and spread ones are not."""

    class Own(torch.Tensor):
        pass

    base = torch.arange(24.0).reshape(4, 6)
    tree: dict[str, Any] = {f"{n}": torch.full((n % 5, 3), float(n)) for n in range(60)}
    tree |= {f"int {n}": torch.tensor([n, -n]) for n in range(20)}
    tree |= {"turned": base.T, "part": base[:, 2:4], "spread": base[:1].expand(5, 6), "own": base.as_subclass(Own)}
    tree |= {"negative": torch.tensor([1 + 2j, 3 - 4j]).conj().imag, "trained": torch.nn.Parameter(base[1])}
    tree |= {"large": torch.arange(1 << 17, dtype=torch.float32), "half": base.half(), "brain": base.bfloat16()}
    px.testing.run_ranks(ranks, lambda world: px.checkpoint.save(tmp_path / "a", tree, world))
    px.checkpoint.verify(tmp_path / "a")
    found = px.checkpoint.load(tmp_path / "a")
    assert list(found) == list(tree)
    for name, tensor in tree.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor.detach().as_subclass(torch.Tensor)), name


def test_modules_and_optimizers_go_on_where_they_were(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    px.checkpoint.save(tmp_path / "a", {"model": model, "optimizer": optimizer, "step": 1})
    other, its_optimizer = trained(2, steps=0)  # an optimizer that has no state yet
    found = px.checkpoint.load(tmp_path / "a", like={"model": other, "optimizer": its_optimizer})
    assert found["model"] is other
    assert found["step"] == 1
    for each, its in ((model, optimizer), (other, its_optimizer)):
        torch.manual_seed(3)
        its.zero_grad()
        each(torch.randn(4, 5)).square().sum().backward()
        its.step()
    for mine, theirs in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_tensor_of_another_dtype_is_converted(tmp_path: Path) -> None:
    px.checkpoint.save(tmp_path / "a", {"x": torch.arange(6.0, dtype=torch.bfloat16)})
    mine = torch.zeros(6)
    assert px.checkpoint.load(tmp_path / "a", like={"x": mine})["x"] is mine
    assert mine.tolist() == [0, 1, 2, 3, 4, 5]
    array = px.checkpoint.load(tmp_path / "a", like={"x": np.zeros(6)})["x"]
    assert array.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_dtensors_on_other_meshes(tmp_path: Path, ranks: int) -> None:
    whole = torch.arange(7 * 6.0).reshape(7, 6)

    def saves(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        ways = [[Shard(0), Shard(1)], [Shard(0), Replicate()], [Shard(0), Shard(0)], [Replicate(), Replicate()]]
        tree = {str(number): distribute_tensor(whole, mesh, way) for number, way in enumerate(ways)}
        px.checkpoint.save(tmp_path / "a", tree, dist.group.WORLD.group)

    def loads(rank: int) -> None:
        mesh = init_device_mesh("cpu", (ranks,))
        like = {str(number): distribute_tensor(torch.zeros(7, 6), mesh, [Shard(number % 2)]) for number in range(4)}
        found = px.checkpoint.load(tmp_path / "a", dist.group.WORLD.group, like=like)
        assert all(torch.equal(tensor.full_tensor(), whole) for tensor in found.values())

    together(4, saves)
    sizes = [len(tensor.pieces) for tensor in px.checkpoint.index.read_index(tmp_path / "a").tensors.values()]
    assert sizes == [4, 2, 4, 1]
    together(ranks, loads)
    assert all(torch.equal(tensor, whole) for tensor in px.checkpoint.load(tmp_path / "a").values())


def test_fsdp2(tmp_path: Path) -> None:
    def saves(rank: int) -> Any:
        model, _ = trained(1, steps=0)
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(4, 5)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        px.checkpoint.save(tmp_path / "a", {"model": model, "optimizer": optimizer}, dist.group.WORLD.group)
        model.eval()
        return model(torch.ones(1, 5)).square().sum().item()

    def loads(rank: int) -> Any:
        model, _ = trained(2, steps=0)
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        px.checkpoint.load(tmp_path / "a", dist.group.WORLD.group, like={"model": model, "optimizer": optimizer})
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        model.eval()
        return model(torch.ones(1, 5)).square().sum().item()

    first = together(3, saves)
    assert together(2, loads) == pytest.approx(first[:2], rel=1e-6)
    # Without FSDP, in one process.
    model, _ = trained(3, steps=0)
    px.checkpoint.load(tmp_path / "a", like={"model": model})
    model.eval()
    assert model(torch.ones(1, 5)).square().sum().item() == pytest.approx(first[0], rel=1e-6)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_checkpoints_of_torch(tmp_path: Path) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    tree = {"model": {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3)}, "step": 4}
    px.checkpoint.save(tmp_path / "a", tree)
    px.checkpoint.export_dcp(tmp_path / "a", tmp_path / "dcp")
    found = {"model": {"w": torch.zeros(2, 3), "b": torch.zeros(3)}, "step": 0}
    dcp.load(found, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert torch.equal(found["model"]["w"], tree["model"]["w"])
    assert found["step"] == 4
    px.checkpoint.import_dcp(tmp_path / "dcp", tmp_path / "b")
    back = px.checkpoint.load(tmp_path / "b")
    assert torch.equal(back["model"]["w"], tree["model"]["w"])
    assert back["step"] == 4


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (lambda: torch.zeros(2, 2).to_sparse(), "x: a torch.sparse_coo tensor cannot be saved"),
        (lambda: torch.zeros(2, device="meta"), "x: a tensor on the meta device has no values"),
    ],
)
def test_tensors_that_cannot_be_saved(tmp_path: Path, tensor: Any, words: str) -> None:
    with pytest.raises(px.UnsupportedArray, match=words):
        px.checkpoint.save(tmp_path / "a", {"x": tensor()})
