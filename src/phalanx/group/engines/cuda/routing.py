"""From which size a collective on arrays of a GPU goes which way. The core decides by it, on all ranks alike.

Figures of an H200, driver 580, without MPS, float32, two ranks:

- Through the memory of the host a short array takes 21 µs, by copy engines, which need no time slice of the GPU. The
  kernel takes 16 µs if the GPU is idle, but 4,500 if the ranks compute: each process has its time slices.
- From 64 KiB on the kernel is quicker by far if it may run: 271 µs for 256 MiB, of which 259 are the memory's.
- While the ranks compute, both are equal at 16 MiB.
"""

from __future__ import annotations

__all__ = ["SHORT", "SHORT_IF_BUSY", "SLICE"]

SHORT = 64 << 10
"""Bytes up to which an array goes through the memory of the host, whatever the GPU does."""
SHORT_IF_BUSY = 16 << 20
"""The same while the ranks' own kernels keep the GPU busy."""
SLICE = 1e-3
"""Seconds that a kernel takes at least if it had to wait for the time slices of other processes."""
