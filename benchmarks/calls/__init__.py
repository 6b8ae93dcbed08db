"""`python -m benchmarks rpc`: measures remote calls, beside a bare pipe, torch.distributed.rpc, pyzmq, gRPC and Ray.

Every contender is two processes on this machine: rank 0 calls, rank 1 answers what it was sent. They are started, asked
and ended as those of a collective are (`phalanx.cli.bench`); only what a rank runs is another (`worker`).
`contenders` knows how each is started, `with_*` how each is called, `plan` what is measured, `goals` what is asked of
Phalanx, `show` how it looks.

Nothing is imported here: Ray has a Python of its own, in which `worker` and `with_ray` run without this package.
"""
