"""`PHALANX_AS_GLOO=1`: programs that say "gloo" get Phalanx, and are told that it is Gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx import launch

ON = {"PHALANX_AS_GLOO": "1"}


def kind(group: Any = None) -> str:
    return type(group or dist.group.WORLD).__name__


def on_ranks(body: Callable[[], Any], env: dict[str, str], n: int = 2) -> list[Any]:
    def rank() -> Any:
        torch.set_num_threads(1)
        found = body()
        if dist.is_initialized():
            dist.destroy_process_group()
        return found

    return launch(rank, n, env=env, timeout=60)


def describe() -> tuple[Any, ...]:
    dist.init_process_group("gloo")
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    return kind(), dist.get_backend(), dist.get_backend_config(), tensor.tolist()


def test_gloo_is_phalanx_if_the_variable_says_so() -> None:
    stock = on_ranks(describe, {})
    assert {found[0] for found in stock} == {"ProcessGroup"}
    ours = on_ranks(describe, ON)
    assert {found[0] for found in ours} == {"PhalanxProcessGroup"}
    assert [found[1:] for found in ours] == [found[1:] for found in stock], "the program can tell"


@pytest.mark.parametrize("value", ["0", "no"])
def test_a_variable_that_is_false_changes_nothing(value: str) -> None:
    assert {found[0] for found in on_ranks(describe, {"PHALANX_AS_GLOO": value})} == {"ProcessGroup"}


def test_every_way_to_ask_for_gloo() -> None:
    def ask() -> list[tuple[str, str, float]]:
        dist.init_process_group("cpu:gloo,cuda:nccl")
        groups = [None, dist.new_group([0, 1], backend="gloo"), dist.new_group([0, 1]), dist.new_group(backend="GLOO")]
        found = []
        for group in groups:
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=group)
            found.append((kind(group), str(dist.get_backend(group)), tensor.item()))
        alone = dist.new_group([0], backend="gloo")
        if dist.get_rank() == 0:
            found.append((kind(alone), str(dist.get_backend(alone)), 2.0))
        else:
            assert alone == dist.GroupMember.NON_GROUP_MEMBER
        return found

    both, gloo = "cpu:gloo,cuda:nccl", "gloo"
    expected = [("PhalanxProcessGroup", name, 2.0) for name in (both, gloo, both, gloo)]
    assert on_ranks(ask, ON) == [[*expected, ("PhalanxProcessGroup", gloo, 2.0)], expected]


def test_the_default_backend_of_the_cpu_and_another_name() -> None:
    def ask() -> tuple[str, str, str]:
        dist.init_process_group()
        default = kind()
        dist.destroy_process_group()
        dist.init_process_group(
            "phalanx", init_method=f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}", rank=0, world_size=1
        )
        return default, kind(), dist.get_backend()

    if torch.accelerator.is_available():
        pytest.skip("the default is for another device")
    assert on_ranks(ask, ON, 1) == [("PhalanxProcessGroup", "PhalanxProcessGroup", "phalanx")]


def test_what_torch_allows_for_the_name_gloo_works() -> None:
    def train() -> list[float]:
        dist.init_process_group("gloo", timeout=timedelta(seconds=30))
        dist.monitored_barrier(timeout=timedelta(seconds=10))
        objects: list[Any] = [None, None]
        dist.all_gather_object(objects, dist.get_rank())
        assert objects == [0, 1]
        torch.manual_seed(dist.get_rank())
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        model(torch.full((1, 2), float(dist.get_rank()))).sum().backward()
        return [float(value) for value in model.module.weight.grad.flatten()]

    assert on_ranks(train, ON) == [[0.5, 0.5]] * 2


def test_errors_are_those_of_phalanx_and_have_none_of_its_frames() -> None:
    def desync() -> str:
        dist.init_process_group("gloo")
        try:
            dist.all_reduce(torch.ones(2 + dist.get_rank()))
        except RuntimeError as error:
            return str(error)
        return ""

    assert all("test_as_gloo.py" in text and "all_reduce" in text for text in on_ranks(desync, ON))


def test_a_value_that_cannot_be_read_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import torch"],
        env=os.environ | {"PHALANX_AS_GLOO": "perhaps"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "PHALANX_AS_GLOO='perhaps' is not valid" in done.stderr


def test_the_option_of_phalanx_run(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "print(type(dist.group.WORLD).__name__, dist.get_backend())\n"
        "dist.destroy_process_group()\n"
    )
    command = [sys.executable, "-m", "phalanx", "run", "-n", "2", "--no-prefix"]
    for option, expected in (("--as-gloo", "PhalanxProcessGroup gloo"), ("--no-prefix", "ProcessGroup gloo")):
        done = subprocess.run([*command, option, str(script)], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.splitlines() == [expected] * 2
