"""Collectives by NCCL, with stand-ins for NCCL and the driver in real processes: calls, results, and every failure."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.gpu import test_collectives
from tests.gpu.fake import DriverArray, FakeDriver, install
from tests.gpu.fake_nccl import FakeNccl, install_nccl
from tests.gpu.gpu import needs_gpu
from tests.gpu.test_collectives import LONG, all_verbs

import phalanx as px
from phalanx.cuda.nccl import DTYPES, OPS
from phalanx.testing import faults, run_ranks


def own_gpu(group: px.Group, folder: str, **options: Any) -> tuple[FakeDriver, FakeNccl]:
    """The stand-ins of a rank that has a GPU of its own."""
    fake = install(uuid=bytes([group.rank]) * 16)
    return fake, install_nccl(fake, Path(folder), **options)


def small_numbers(rank: int, count: int, dtype: Any = np.float32) -> Any:
    """Values whose sums and products are exact: NCCL adds in an order of its own."""
    return np.random.default_rng(rank).integers(1, 9, count).astype(dtype)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_every_verb(transport: str, tmp_path: Path) -> None:
    def body(group: px.Group, folder: str) -> Any:
        fake, nccl = own_gpu(group, folder)
        test_collectives.values = small_numbers  # of this process
        wrong = all_verbs(group, fake, LONG)
        group.barrier()
        group.close()
        return wrong, {call[0] for call in nccl.calls}, fake.calls

    for wrong, called, kernels in run_ranks(
        3, body, str(tmp_path), backend="mesh", options=px.Options(transport=transport)
    ):
        assert wrong == []
        verbs = {"all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather", "send", "recv"}
        assert called >= verbs | {"start"}
        assert kernels == []


def test_the_calls_of_each_verb(tmp_path: Path) -> None:
    """What NCCL is asked for: elements and numbers of dtypes for reductions, bytes for all others."""

    def body(group: px.Group, folder: str) -> Any:
        _, nccl = own_gpu(group, folder)
        f32, bf16 = DTYPES["float32"], DTYPES["float64"]
        found = {}

        def record(name: str, call: Any) -> None:
            nccl.calls.clear()
            call()
            found[name] = [one for one in nccl.calls if one[0] != "start"]

        x = DriverArray(np.ones(6, np.float32))
        record("mean", lambda: group.all_reduce(x, "mean"))
        record("float64", lambda: group.all_reduce(DriverArray(np.ones(6)), "max"))
        record("broadcast", lambda: group.broadcast(x, 1))
        record("gather", lambda: group.gather(x, 1, DriverArray(np.zeros(12, np.float32)) if group.rank else None))
        record("uneven", lambda: group.all_gather(x, DriverArray(np.zeros(12, np.float32)), counts=[6, 6]))
        short = DriverArray(np.ones(group.rank + 1, np.float32))
        record("ragged", lambda: group.all_gather(short, DriverArray(np.zeros(3, np.float32)), counts=[1, 2]))
        record("empty", lambda: group.all_reduce(DriverArray(np.ones(0, np.float32))))
        assert found["mean"] == [("all_reduce", 6, f32, OPS["mean"])]
        assert found["float64"] == [("all_reduce", 6, bf16, OPS["max"])]
        assert found["broadcast"] == [("broadcast", 24, 1)]
        assert found["gather"] == [("recv", 24, 0) if group.rank else ("send", 24, 1)]
        assert found["uneven"] == [("all_gather", 24)]
        assert found["ragged"] == [("broadcast", 4, 0), ("broadcast", 8, 1)]
        assert found["empty"] == []
        return True

    assert run_ranks(2, body, str(tmp_path), backend="mesh") == [True, True]


def test_what_nccl_lacks_goes_through_the_host(tmp_path: Path) -> None:
    def body(group: px.Group, folder: str) -> Any:
        _, nccl = own_gpu(group, folder)
        x, y = DriverArray(np.full(5, group.rank + 1, np.int16)), DriverArray(np.full(5, group.rank + 1, np.int32))
        group.all_reduce(x)
        group.all_reduce(y, "bor")
        z = DriverArray(np.ones(5, np.float32))
        group.all_reduce(z)
        group.all_reduce(z)  # what NCCL has still goes by it
        assert getattr(group._fast_path, "device", None) is None, "it would take tensors of torch past NCCL"
        return x.numpy().tolist(), y.numpy().tolist(), z.numpy()[0], [call[0] for call in nccl.calls]

    expected = ([3] * 5, [3] * 5, 4.0, ["start", "all_reduce", "all_reduce"])
    assert run_ranks(2, body, str(tmp_path), backend="mesh") == [expected] * 2


def test_a_rank_without_nccl(tmp_path: Path) -> None:
    """Versions that differ, or are missing on one rank: no rank uses NCCL."""

    def body(group: px.Group, folder: str) -> Any:
        _, nccl = own_gpu(group, folder, version=23203 - group.rank)
        x = DriverArray(np.ones(LONG, np.float32))
        group.all_reduce(x)
        return float(x.numpy()[0]), nccl.calls

    assert run_ranks(2, body, str(tmp_path), backend="mesh") == [(2.0, [])] * 2


@pytest.mark.parametrize("choice", ["nccl", "hybrid"])
def test_nccl_is_chosen_and_refuses_one_gpu(choice: str, tmp_path: Path) -> None:
    def body(group: px.Group, folder: str) -> Any:
        group.backend.gpu_choice = choice
        nccl = install_nccl(install(), Path(folder))
        with pytest.raises(px.errors.UnsupportedOp, match=r"all ranks share one GPU, which NCCL 2\.32\.3 refuses"):
            group.all_reduce(DriverArray(np.ones(4, np.float32)))
        return nccl.calls

    assert run_ranks(2, body, str(tmp_path), backend="mesh") == [[], []]


def test_nccl_was_told_to_share_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")

    def body(group: px.Group, folder: str) -> Any:
        group.backend.gpu_choice = "nccl"
        nccl = install_nccl(install(), Path(folder))
        with group.subgroup([0, 1]) as pair:  # has its parent's choice
            pair.all_reduce(DriverArray(np.ones(4, np.float32)))
        with pytest.raises(px.errors.UnsupportedOp, match="NCCL does not have the reduction 'bor'"):
            group.all_reduce(DriverArray(np.ones(4, np.int32)), "bor")
        return [call[0] for call in nccl.calls]

    assert run_ranks(2, body, str(tmp_path), backend="mesh") == [["start", "all_reduce", "finalize", "destroy"]] * 2


def test_ranks_with_different_choices(tmp_path: Path) -> None:
    def body(group: px.Group, folder: str) -> Any:
        own_gpu(group, folder)
        if group.rank:
            group.backend.gpu_choice = "hybrid"
        with pytest.raises(px.errors.UsageError, match="auto on rank 0, hybrid on rank 1"):
            group.all_reduce(DriverArray(np.ones(4, np.float32)))
        return True

    assert run_ranks(2, body, str(tmp_path), backend="mesh") == [True, True]


def test_asynchronous_ones_and_subgroups(tmp_path: Path) -> None:
    def body(group: px.Group, folder: str) -> Any:
        own_gpu(group, folder)
        first, second = DriverArray(small_numbers(group.rank, 9)), DriverArray(np.ones(9, np.float32))
        works = [group.all_reduce(one, async_op=True) for one in (first, second)]
        for work in works:
            work.wait()
        if group.rank < 2:
            with group.subgroup([0, 1]) as pair:
                pair.all_reduce(second)
        return second.numpy()[0]

    assert run_ranks(3, body, str(tmp_path), backend="mesh") == [6.0, 6.0, 3.0]


def test_the_end(tmp_path: Path) -> None:
    """A group that is closed ends its communicator together with the others, and does not abort it."""

    def body(group: px.Group, folder: str) -> Any:
        _, nccl = own_gpu(group, folder)
        group.all_reduce(DriverArray(np.ones(9, np.float32)))
        group.close()
        return [call[0] for call in nccl.calls]

    assert run_ranks(2, body, str(tmp_path), backend="mesh") == [["start", "all_reduce", "finalize", "destroy"]] * 2


def test_the_end_of_one_rank_alone(tmp_path: Path) -> None:
    """A rank that closes its group while the others go on does not wait for them for ever."""

    def body(group: px.Group, folder: str) -> Any:
        _, nccl = own_gpu(group, folder)
        pair = group.subgroup([0, 1])
        pair.all_reduce(DriverArray(np.ones(9, np.float32)))
        if group.rank == 0:
            pair.close()
        group.barrier()
        pair.close()
        return [call[0] for call in nccl.calls]

    found = run_ranks(2, body, str(tmp_path), backend="mesh")
    assert found[0] == ["start", "all_reduce", "finalize", "abort"]


@needs_gpu
@pytest.mark.skipif(importlib.util.find_spec("nccl") is None, reason="nccl4py is not installed")
def test_one_rank_on_a_real_gpu() -> None:
    """NCCL itself, as far as one GPU goes: it starts without blocking, does every operation, and ends."""

    def body(group: px.Group) -> Any:
        group.backend.gpu_choice = "nccl"
        test_collectives.values = small_numbers
        wrong = []
        every = small_numbers(0, LONG)
        for dtype in (np.float32, np.float64, np.float16, np.int8, np.uint64):
            for op in ("sum", "min"):
                x = DriverArray(every.astype(dtype))
                group.all_reduce(x, op)
                wrong += [(dtype, op)] * (not np.array_equal(x.numpy(), every.astype(dtype)))
        x, out = DriverArray(every), DriverArray(np.zeros(LONG, np.float32))
        for verb in (group.all_gather, group.all_to_all):
            out.fill(0)
            verb(x, out)
            wrong += [verb.__name__] * (not np.array_equal(out.numpy(), every))
        out.fill(0)
        group.reduce_scatter(x, "mean", out)
        group.broadcast(out, 0)
        group.reduce(out, 0)
        wrong += ["others"] * (not np.array_equal(out.numpy(), every))
        with pytest.raises(px.errors.UnsupportedOp):
            group.all_reduce(DriverArray(np.ones(4, np.int16)))
        group.close()
        return wrong

    assert run_ranks(1, body, backend="mesh") == [[]]


# -- failures ----------------------------------------------------------------------------------------------------------


def outcome(nccl: FakeNccl, call: Any, x: DriverArray) -> dict[str, Any]:
    """How a call failed, what NCCL was asked for meanwhile, and whether anything wrote to the array afterwards."""
    began, before = time.monotonic(), len(nccl.calls)
    try:
        call()
    except px.PhalanxError as error:
        seconds = time.monotonic() - began
        x.fill(7)
        time.sleep(0.5)
        return {
            "error": type(error).__name__,
            "peer": getattr(error, "peer", None),
            "seconds": seconds,
            "intact": bool((x.numpy() == 7).all()),
            "text": str(error),
            "calls": [one[0] for one in nccl.calls[before:]],
        }
    return {"error": None}


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_dies_in_the_middle(victim: int, transport: str, tmp_path: Path) -> None:
    """All have met, and the kernels of the others wait for one that was never launched: every survivor aborts."""

    def body(group: px.Group, folder: str) -> Any:
        _, nccl = own_gpu(group, folder)
        x = DriverArray(np.ones(LONG, np.float32))
        group.all_reduce(x)
        if group.rank == victim:
            nccl.on_enqueue = lambda name: faults.kill_self()
        return outcome(nccl, lambda: group.all_reduce(x, timeout=30), x)

    found = run_ranks(3, body, str(tmp_path), backend="mesh", may_die=[victim], options=px.Options(transport=transport))
    for rank, one in enumerate(found):
        if rank != victim:
            assert (one["error"], one["peer"], one["intact"]) == ("PeerLost", victim, True), one
            # Over TCP some know earlier that all have met: the others may hear of the end of one of them before.
            may_hear_first = transport == "tcp"
            assert one["calls"] == ["all_reduce", "abort"] or (may_hear_first and one["calls"] == []), one
            assert one["seconds"] < 2.5, one  # a second, and what this machine is late


def test_the_survivors_go_on(tmp_path: Path) -> None:
    """The group that they shrink to has a communicator of its own."""

    def body(group: px.Group, folder: str) -> Any:
        _, nccl = own_gpu(group, folder)
        x = DriverArray(np.ones(LONG, np.float32))
        group.all_reduce(x)
        if group.rank == 1:
            nccl.on_enqueue = lambda name: faults.kill_self()
        with pytest.raises(px.PeerLost):
            group.all_reduce(x)
        x.fill(1)
        rest = group.shrink()
        rest.all_reduce(x)
        return float(x.numpy()[0]), [call[0] for call in nccl.calls]

    calls = ["start", "all_reduce", "all_reduce", "abort", "start", "all_reduce"]
    found = run_ranks(3, body, str(tmp_path), backend="mesh", may_die=[1])
    assert [found[0], found[2]] == [(2.0, calls)] * 2


def test_a_rank_dies_before_they_meet(tmp_path: Path) -> None:
    """Nothing is given to NCCL then, and the communicator goes when the group does."""

    def body(group: px.Group, folder: str) -> Any:
        _, nccl = own_gpu(group, folder)
        x = DriverArray(np.ones(LONG, np.float32))
        group.all_reduce(x)
        if group.rank == 0:
            time.sleep(0.3)  # a rank that dies at once may be lost in the first one, which the others have not left
            faults.kill_self()
        found = outcome(nccl, lambda: group.all_reduce(x, timeout=30), x)
        group.close()
        return found | {"end": nccl.calls[-1]}

    for one in run_ranks(3, body, str(tmp_path), backend="mesh", may_die=[0])[1:]:
        assert (one["error"], one["peer"], one["intact"], one["calls"]) == ("PeerLost", 0, True, []), one
        assert one["end"] == ("abort",)


def test_a_rank_dies_while_nccl_starts(tmp_path: Path) -> None:
    def body(group: px.Group, folder: str) -> Any:
        _, nccl = own_gpu(group, folder)
        if group.rank == 1:
            nccl.on_init = faults.kill_self
        x = DriverArray(np.ones(LONG, np.float32))
        return outcome(nccl, lambda: group.all_reduce(x, timeout=30), x)

    found = run_ranks(3, body, str(tmp_path), backend="mesh", may_die=[1])
    for one in (found[0], found[2]):
        assert (one["error"], one["peer"], one["calls"]) == ("PeerLost", 1, ["start", "abort"]), one
        assert one["seconds"] < 2.5, one


def test_the_deadline(tmp_path: Path) -> None:
    """A kernel that does not end in time: its rank gives up and aborts, and so do the others, which wait for it."""

    def body(group: px.Group, folder: str) -> Any:
        _, nccl = own_gpu(group, folder)
        x = DriverArray(np.ones(LONG, np.float32))
        group.all_reduce(x)
        if group.rank == 0:
            nccl.kernel_seconds = 20.0
        return outcome(nccl, lambda: group.all_reduce(x, timeout=0.6 if group.rank == 0 else 30), x)

    found = run_ranks(3, body, str(tmp_path), backend="mesh")
    for one in found:
        assert (one["error"], one["calls"], one["intact"]) == ("Timeout", ["all_reduce", "abort"], True), one
        assert 0.5 < one["seconds"] < 6, one  # the one that gave up asks the others what they do


def test_an_error_that_nccl_finds_later(tmp_path: Path) -> None:
    """The rank that has it says so; the others hear it from that rank, and abort, too."""

    def body(group: px.Group, folder: str) -> Any:
        _, nccl = own_gpu(group, folder)
        x = DriverArray(np.ones(LONG, np.float32))
        group.all_reduce(x)
        if group.rank == 0:
            nccl.kernel_seconds = 20.0
            nccl.on_enqueue = lambda name: setattr(nccl, "async_error", 6)
        return outcome(nccl, lambda: group.all_reduce(x, timeout=30), x)

    for one in run_ranks(3, body, str(tmp_path), backend="mesh"):
        assert "fake error 6" in one["text"], one
        assert (one["calls"], one["intact"]) == (["all_reduce", "abort"], True), one
        assert one["seconds"] < 4, one


def test_nccl_notices_a_lost_rank_first(tmp_path: Path) -> None:
    """The error names the rank all the same."""

    def body(group: px.Group, folder: str) -> Any:
        _, nccl = own_gpu(group, folder)
        x = DriverArray(np.ones(LONG, np.float32))
        group.all_reduce(x)
        if group.rank == 1:
            nccl.on_enqueue = lambda name: faults.kill_self()
        else:
            nccl.on_enqueue = lambda name: setattr(nccl, "async_error", 6)
        return outcome(nccl, lambda: group.all_reduce(x, timeout=30), x)

    found = run_ranks(3, body, str(tmp_path), backend="mesh", may_die=[1])
    for one in (found[0], found[2]):
        assert (one["error"], one["peer"], one["calls"]) == ("PeerLost", 1, ["all_reduce", "abort"]), one


def test_different_operations(tmp_path: Path) -> None:
    """They are found out before NCCL hears of them."""

    def body(group: px.Group, folder: str) -> Any:
        _, nccl = own_gpu(group, folder)
        x = DriverArray(np.ones(LONG, np.float32))
        group.all_reduce(x)
        return outcome(nccl, lambda: group.all_reduce(x) if group.rank else group.broadcast(x, 0), x)

    for one in run_ranks(2, body, str(tmp_path), backend="mesh"):
        assert (one["error"], one["calls"]) == ("Desync", []), one
