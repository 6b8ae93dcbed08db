"""The kernels' PTX is made of their source, and has what the core asks for."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from tests.gpu import fake

from phalanx import _native

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "src" / "phalanx" / "cuda" / "kernels"


def test_the_ptx_is_made_of_the_source() -> None:
    if importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.cuda_nvrtc") is None:
        pytest.skip("NVRTC is not installed (pip install nvidia-cuda-nvrtc-cu12==12.4.127)")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "make_kernels.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_there_is_a_kernel_for_each_dtype() -> None:
    ptx = (KERNELS / "combine.ptx").read_text()
    missing = [name for name in _native.DTYPES if f".entry combine_{name}(" not in ptx]
    assert not missing
    assert f"combine_bool_param_0[{fake.PLAN_BYTES}]" in ptx, "the plan has another size in combine.cu"
    source = (KERNELS / "combine.cu").read_text()
    assert f"POINTERS = {fake.POINTERS}, PIECES = {fake.PIECES}" in source
