"""torch's suite as a module, changed so that it runs on any backend, and with several ranks on one GPU.

What keeps a test from running is lifted where it has nothing to do with the backend: names of backends, a GPU for each
rank, eight ranks. A rank that takes its number for that of its GPU gets GPU 0. With `DEVICE = "cuda"`, a test that says
nothing of GPUs makes its tensors there. It is imported once; the ranks of each test are forked from that process, so
nothing here may begin to use CUDA.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import inspect
import os
import re
import sys
import types
import unittest
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["MANY", "Suite", "is_for_gpu", "load", "ranks_of"]

MODULE = "torch.testing._internal.distributed.distributed_test"
RANK = r"(?:self\.|my_|next_)?rank"
ON_ONE_GPU = [
    (rf"\.cuda\({RANK}\)", ".cuda(0)"),
    (rf"\.to\({RANK}\)", ".to(0)"),
    (rf"\bdevice={RANK}\b", "device=0"),
    (rf"\bdevice(_id)? = {RANK}$", r"device\1 = 0"),
    (rf"\bdevice_ids=\[{RANK}\]", "device_ids=[0]"),
    (rf"\boutput_device={RANK}\b", "output_device=0"),
    (rf"\b(set_device|Stream|torch\.device|MyModel)\({RANK}\)", r"\1(0)"),
    (rf'f"cuda:\{{{RANK}:d\}}"', '"cuda:0"'),
    (r"\bgpus = \[rank\]", "gpus = [0]"),
    (r"\bnew_group\(gpus\)", "new_group(list(range(world_size)))"),
    (r'\bnew_group\(ranks=\[0, 1\], backend="nccl"\)', "new_group(ranks=[0, 1])"),
    (rf"\.device\.index, {RANK}\)", ".device.index, 0)"),
    (r'get\("device_ids"\), str\(rank\)', 'get("device_ids"), "0"'),
    (r'get\("output_device"\), rank\)', 'get("output_device"), 0)'),
    (r"\bif device_id == 0 or device_id == 2:", "if rank in (0, 2):"),
    (r"^            time\.sleep\(0\.1\)$", "            time.sleep(0.01)"),  # of the barrier between tests
    (r"if torch\.cuda\.is_available\(\) and torch\.cuda\.device_count\(\) < int\(", "if False and int("),
]
"""What is replaced in the source: each rank's GPU is the first. Lines stay where they are."""
LIFTED = re.compile(
    r"Only (NCCL|Nccl|MPI) supports|(NCCL|GLOO) (Batch )?Send Recv|Coalescing manager|Only (Gloo|Nccl)( and|,)|"
    r"Test requires backend \S+ to be one of"
)
"""Why torch skips a test for all backends but some, where others may be able to do it."""
_IS_AVAILABLE, _DEVICE_COUNT = torch.cuda.is_available, torch.cuda.device_count
NOT_INITIALIZED = 3
"""The driver's answer before its first use."""
TO_SAY_SO = 8.0
"""Seconds in which the ranks of a test that hangs say where they are."""
MANY = 4
"""Ranks of a test that is for more than two."""


class LikeGloo(str):
    """The name of a backend, which tests take for Gloo's where they ask: it is to do what that does."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or other == "gloo"

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def load(backend: str, device: str, limit: float = 60.0) -> type[unittest.TestCase]:
    """The suite for a backend and a device: a class whose tests start their ranks themselves.

    Args:
        limit: Seconds for a test; a little earlier it says where its ranks are.
    """
    # The decorators see the name of Gloo, and two ranks; each test gets its own number later.
    os.environ.update(BACKEND="gloo", WORLD_SIZE="2")
    # To ask CUDA makes it unusable in processes that are forked then: torch's modules find none, the ranks do.
    torch.cuda.is_available, torch.cuda.device_count = lambda: False, lambda: 0
    common = importlib.import_module("torch.testing._internal.common_distributed")
    _lift(common)
    for backends in common.DistTestCases.backend_feature.values():
        backends.add(backend)
    common.TIMEOUT_DEFAULT = max(5.0, limit - TO_SAY_SO)
    suite = _rewritten()
    if device == "cuda":
        _check_driver()
    suite.BACKEND = backend if backend == "nccl" else LikeGloo(backend)
    for listed in (
        suite.PROFILING_SUPPORTED_BACKENDS,
        suite.CUDA_PROFILING_SUPPORTED_BACKENDS,
        suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS,
    ):
        listed.append(backend)
    os.environ["BACKEND"] = backend
    if backend != "gloo":
        dist.monitored_barrier = dist.distributed_c10d.monitored_barrier = _monitored_barrier
    _check_values(suite)
    Suite.device, Suite.module = device, suite
    return type("Suite", (Suite, suite.TestDistBackend, suite.DistributedTest._DistTestBase), {})


def ranks_of(test: Callable[..., Any]) -> int:
    """How many ranks a test is for."""
    return int(getattr(test, "ranks", 2))


class Suite:
    """What the suite does otherwise here."""

    device = "cpu"
    module: Any = None
    """torch's, with its changes."""
    exit_codes: list[int | None]

    def setUp(self) -> None:
        super().setUp()  # type: ignore[misc]
        self._start_processes(torch.multiprocessing.get_context("fork").Process)  # type: ignore[attr-defined]

    @classmethod
    def prepare_row(cls) -> None:
        """Does once, for several tests, what `setUp` does for one."""
        cls.module.initialize_temp_directories()
        cls.module.Barrier.init()

    @classmethod
    def _run(cls, rank: int, test_name: str, *args: Any, **kwargs: Any) -> None:
        torch.cuda.is_available, torch.cuda.device_count = _IS_AVAILABLE, _DEVICE_COUNT
        # NCCL, which some tests use beside the backend, takes two ranks on one GPU only if it finds two hosts.
        os.environ.update(NCCL_HOSTID=f"rank-{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        if cls.device == "cuda":
            torch.cuda.set_device(0)
            if not is_for_gpu(getattr(cls, test_name)):
                torch.set_default_device("cuda")
        super()._run(rank, test_name, *args, **kwargs)  # type: ignore[misc]

    def _check_return_codes(self, *args: Any) -> Any:
        type(self).exit_codes = [process.exitcode for process in self.processes]  # type: ignore[attr-defined]
        return super()._check_return_codes(*args)  # type: ignore[misc]


def is_for_gpu(test: Callable[..., Any]) -> bool:
    """True if a test says what is on a GPU."""
    return re.search("cuda|gpu", inspect.getsource(inspect.unwrap(test)), re.IGNORECASE) is not None


def _lift(common: Any) -> None:
    """Replaces the decorators by which tests are skipped."""
    utils = common.common_utils
    skip_if = utils.skip_but_pass_in_sandcastle_if
    utils.skip_but_pass_in_sandcastle = lambda reason: skip_if(not LIFTED.match(reason), reason)
    utils.skip_but_pass_in_sandcastle_if = lambda skipped, reason: skip_if(skipped and not LIFTED.match(reason), reason)
    utils.check_if_enable = lambda _test: None  # to read a list of torch's, it would begin with CUDA
    common.skip_if_no_gpu = lambda test: test
    common.skip_if_small_worldsize = _for_ranks(MANY)
    common.skip_if_lt_x_gpu = lambda count, **_: _for_ranks(MANY if count > 2 else 2)
    common.nccl_skip_if_lt_x_gpu = lambda _backend, count: _for_ranks(MANY if count > 2 else 2)
    common.require_n_gpus_for_nccl_backend = lambda _count, _backend: lambda test: test
    common.requires_nccl_version = lambda *_: lambda test: test
    common.init_multigpu_helper = lambda ranks, _backend: {rank: [0] for rank in range(ranks)}
    common.TIMEOUT_OVERRIDE.clear()


def _for_ranks(count: int) -> Callable[[Any], Any]:
    """A decorator that notes how many ranks a test needs at least."""

    def decorate(test: Any) -> Any:
        test.ranks = max(count, ranks_of(test))
        return test

    return decorate


def _rewritten() -> Any:
    """The suite's module, from its source with the changes above.

    Raises:
        LookupError: There is nothing to change: this release of torch says it in another way.
    """
    spec = importlib.util.find_spec(MODULE)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    for pattern, replacement in ON_ONE_GPU:
        source, found = re.subn(pattern, replacement, source, flags=re.MULTILINE)
        if not found:
            raise LookupError(f"torch {torch.__version__} has no {pattern!r} in its suite any more")
    source = re.sub(r"^def require_(exact_)?world_size\(", r"def _require_\1world_size(", source, flags=re.MULTILINE)
    module: Any = types.ModuleType(MODULE)
    module.__file__ = spec.origin
    module.require_world_size = module.require_exact_world_size = _for_ranks
    sys.modules[MODULE] = module
    exec(compile(source, spec.origin, "exec", dont_inherit=True), module.__dict__)
    return module


def _check_driver() -> None:
    """Makes sure that this process has not begun to use CUDA.

    Raises:
        RuntimeError: It has, through a module that was imported.
    """
    if ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != NOT_INITIALIZED:
        raise RuntimeError("what was imported has begun to use CUDA, so no rank can be forked from here")


def _check_values(suite: Any) -> None:
    """torch's test of `all_reduce` knows what to expect, but never looks at the result."""
    base = suite.DistributedTest._DistTestBase
    shipped = base._test_all_reduce_helper

    @functools.wraps(shipped)
    def helper(self: Any, group: Any, group_id: Any, rank: int, op: Any, *values: Any, **how: Any) -> None:
        shipped(self, group, group_id, rank, op, *values, **how)
        master, worker, expected = values[:3]
        dtype, is_cuda = how.get("dtype", torch.float), how.get("cuda", len(values) > 3 and values[3])
        for src in group:
            tensor = suite._build_tensor(src + 1, dtype=dtype).fill_(master if rank == src else worker)
            tensor = tensor.cuda() if is_cuda else tensor
            work = dist.all_reduce(tensor, op, group_id, async_op=how.get("async_op", False))
            if work is not None:
                work.wait()
            self.assertEqual(tensor, suite._build_tensor(src + 1, expected, dtype=dtype).to(tensor.device))  # noqa: PT009 - for tensors
        self._barrier()

    base._test_all_reduce_helper = helper


def _monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
    """torch's function, which takes no other name than Gloo's."""
    c10d = dist.distributed_c10d
    if c10d._rank_not_in_group(group):
        return None
    timeout = c10d.default_pg_timeout if timeout is None else timeout
    timeout = timedelta(seconds=timeout) if isinstance(timeout, float) else timeout
    return (group or c10d._get_default_group()).monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)
