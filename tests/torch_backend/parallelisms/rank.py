"""One rank, in a process of its own: `python -m tests.torch_backend.parallelisms.rank` with the arguments of `main`."""

from __future__ import annotations

import faulthandler
import json
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from . import checkpoints, compiled, data_parallel, functional, groups, pipelines, sharded, tensor_parallel

STUCK = 200.0
"""Seconds after which a rank shows what all its threads do, and ends."""
MODULES = (groups, data_parallel, sharded, tensor_parallel, pipelines, checkpoints, functional, compiled)


def main(backend: str, ranks: str, only: str, without: str, folder: str, rank: str) -> None:
    faulthandler.dump_traceback_later(STUCK, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=int(rank),
        world_size=int(ranks),
        timeout=timedelta(seconds=60),
    )
    found = {}
    for module in MODULES:
        for part in module.PARTS:
            name = f"{module.__name__.rpartition('.')[2]}.{part.__name__}"
            if only not in name or without in name:
                continue
            torch.manual_seed(0)
            begin = time.monotonic()
            try:
                found[name] = part()
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
                if "-v" in sys.argv:
                    traceback.print_exc()
            if "-v" in sys.argv:
                print(f"{name}: {time.monotonic() - begin:.2f} s", file=sys.stderr, flush=True)
            dist.barrier()
    dist.destroy_process_group()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:7])
