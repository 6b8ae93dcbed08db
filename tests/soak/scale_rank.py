"""One rank of `scale.py`. It imports nothing but what it measures, and talks to its parent by lines of JSON."""

import json
import resource
import sys
import time


def tell(**values: float) -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    values["cpu"] = usage.ru_utime + usage.ru_stime
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def phalanx(timeout: float) -> None:
    import phalanx as px

    tell(imported=time.monotonic())
    sys.stdin.readline()
    world = px.init(timeout=timeout)
    formed = time.monotonic()
    world.barrier()
    tell(formed=formed, passed=time.monotonic())
    sys.stdin.readline()
    world.close()


def gloo(timeout: float) -> None:
    from datetime import timedelta

    import torch.distributed as dist

    tell(imported=time.monotonic())
    sys.stdin.readline()
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    formed = time.monotonic()
    dist.barrier()
    tell(formed=formed, passed=time.monotonic())
    sys.stdin.readline()
    dist.destroy_process_group()


if __name__ == "__main__":
    {"phalanx": phalanx, "gloo": gloo}[sys.argv[1]](float(sys.argv[2]))
