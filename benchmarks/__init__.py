"""The benchmarks that Phalanx is held to: `python -m benchmarks rpc`, `torch` and `training`, from a checkout.

Each adds contenders and goals to what `phalanx bench` is made of (`phalanx.cli.bench`: processes, rounds, reports).
`calls` compares remote calls with a pipe, torch.distributed.rpc, pyzmq, gRPC and Ray; `under_torch` the plug-in for
torch.distributed with Gloo; `training` whole training steps. `pages` writes the results into the documentation. None of
this is in the wheel.

Nothing is imported here: Ray has a Python of its own, which has no Phalanx.
"""
