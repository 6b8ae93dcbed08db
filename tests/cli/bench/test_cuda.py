"""`phalanx bench --device cuda` without a GPU: tensors of the CPU stand for those on one."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
from tests.launchers.starting import needs_torch

import phalanx as px
from phalanx.cli.bench import with_phalanx
from phalanx.cli.bench.operations import OPERATIONS
from phalanx.cli.bench.orders import CheckOrder, DropOrder, PrepareOrder, RunOrder
from phalanx.cli.bench.with_cuda import _CudaLibrary
from phalanx.cli.bench.worker import _BenchWorker
from phalanx.testing import run_ranks

pytestmark = needs_torch


def on_stand_ins(group: px.Group, dtype: str) -> list[str]:
    import torch

    ended = []
    stream = SimpleNamespace(synchronize=lambda: ended.append(1))
    cuda = SimpleNamespace(get_device_name=lambda: "Fake", current_stream=lambda: stream, synchronize=lambda: None)

    def from_numpy(array: Any) -> Any:
        tensor = torch.from_numpy(array)
        tensor.cuda = tensor.clone
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(with_phalanx.px, "init", lambda timeout: group)
        library = _CudaLibrary(SimpleNamespace(cuda=cuda, from_numpy=from_numpy), with_phalanx.open_world(5.0))
    worker = _BenchWorker(library)
    problems = []
    for slot in OPERATIONS:
        answers = [
            worker.handle(PrepareOrder(slot, slot, 6, dtype, False)),
            worker.handle(CheckOrder(slot)),
            worker.handle(RunOrder(slot, 3)),
        ]
        problems += [f"{slot}: {answer.error or answer.lacks}" for answer in answers if answer.error or answer.lacks]
    worker.handle(CheckOrder("all_reduce"))  # its tensors are still there
    kept = len(library._tensors)
    worker.handle(DropOrder())
    gc.collect()  # a stand-in refers to itself
    assert library.version.endswith("Fake")
    assert len(ended) == 5 * len(OPERATIONS) + 1  # one of each before the three that count
    assert kept > 0
    assert not library._tensors
    return problems


@pytest.mark.parametrize("dtype", ["float32", "int16"])
def test_the_ranks_of_a_run(dtype: str) -> None:
    assert run_ranks(3, on_stand_ins, dtype, backend="mesh") == [[]] * 3
