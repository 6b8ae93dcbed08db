"""Whether there is a GPU, found out without CUDA: a process that has looked by torch cannot be forked any more."""

from __future__ import annotations

from pathlib import Path

import pytest

__all__ = ["needs_gpu"]

needs_gpu = pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="there is no GPU")
