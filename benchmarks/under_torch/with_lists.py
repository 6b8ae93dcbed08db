"""torch.distributed as in `phalanx bench`, and also on lists of tensors, and with messages in two halves."""

from __future__ import annotations

from functools import partial
from typing import Any

from phalanx.cli.bench.library import Call, LibraryLacks, pingpong
from phalanx.cli.bench.operations import ROOT, Arrays
from phalanx.cli.bench.with_torch import TorchLibrary

from .operations import LISTS, POSTED

__all__ = ["open_world"]


class _TorchListLibrary(TorchLibrary):
    def call(self, operation: str, arrays: Arrays) -> Call:
        if operation == POSTED:
            return self._in_halves(self.tensor(arrays.x), None if arrays.out is None else self.tensor(arrays.out))
        return self._on_lists(operation, arrays) if operation in LISTS else super().call(operation, arrays)

    def _in_halves(self, x: Any, out: Any) -> Call:
        def send(tensor: Any, rank: int) -> None:
            self.dist.isend(tensor, rank).wait()

        def receive(tensor: Any, rank: int) -> None:
            self.dist.irecv(tensor, rank).wait()

        return pingpong(self.rank, send, receive, x, out)

    def _on_lists(self, operation: str, arrays: Arrays) -> Call:
        """An operation on tensors that lie apart, as those of most programs do. The first call is the one that is
        checked: it fills them from `x`, and `out` from them.
        """
        if operation == "all_to_all_list" and self.backend == "gloo" and not hasattr(self.dist, "all_gather_single"):
            raise LibraryLacks("Gloo has no all_to_all on lists before torch 2.13")
        dist, x, out = self.dist, self.tensor(arrays.x), None if arrays.out is None else self.tensor(arrays.out)
        x_parts, out_parts = ([part.clone() for part in self.parts(tensor) or ()] for tensor in (x, out))
        calls: dict[str, Call] = {
            "all_gather_list": partial(dist.all_gather, out_parts, x),
            "reduce_scatter_list": partial(dist.reduce_scatter, out, x_parts),
            "all_to_all_list": partial(dist.all_to_all, out_parts, x_parts),
            "gather_list": partial(dist.gather, x, out_parts or None, ROOT),
            "scatter_list": partial(dist.scatter, out, x_parts if self.rank == ROOT else None, ROOT),
        }
        call, is_checked = calls[operation], False

        def checked_once() -> None:
            nonlocal is_checked
            if is_checked:
                call()
                return
            is_checked = True
            for copy, part in zip(x_parts, self.parts(x) or (), strict=True):
                copy.copy_(part)
            call()
            if operation not in ("reduce_scatter_list", "scatter_list"):
                for copy, part in zip(out_parts, self.parts(out) or (), strict=True):
                    part.copy_(copy)

        return checked_once


def open_world(timeout: float, backend: str) -> Any:
    """Joins by the variables of this process, on torch's backend of this name."""
    import torch
    import torch.distributed

    return _TorchListLibrary(torch, backend, timeout)
