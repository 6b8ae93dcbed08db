"""What one finds in torch's own tutorials: it knows nothing of Phalanx."""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((4,), float(rank))
    dist.all_reduce(x)
    heard = torch.zeros(1, dtype=torch.int64)
    sent = dist.isend(torch.tensor([rank]), (rank + 1) % size)
    dist.recv(heard, (rank - 1) % size)
    assert sent is not None
    sent.wait()
    dist.barrier()
    dist.destroy_process_group()
    line = {"rank": rank, "local_rank": int(os.environ["LOCAL_RANK"]), "sum": x.tolist(), "heard": heard.item()}
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
