"""Heat on a rod, cut into parts: a program for mpi4py."""

import numpy as np
from mpi4py import MPI

CELLS, STEPS = 30, 200

comm = MPI.COMM_WORLD
counts = [CELLS // comm.size + (rank < CELLS % comm.size) for rank in range(comm.size)]
rod = np.sin(np.arange(CELLS) / 3.0) if comm.rank == 0 else None
part = np.zeros(counts[comm.rank] + 2)  # a cell of each neighbour at the ends
comm.Scatterv([rod, counts], part[1:-1], root=0)
left = comm.rank - 1 if comm.rank > 0 else MPI.PROC_NULL
right = comm.rank + 1 if comm.rank < comm.size - 1 else MPI.PROC_NULL
for _step in range(STEPS):
    comm.Sendrecv(part[1:2], dest=left, recvbuf=part[-1:], source=right)
    comm.Sendrecv(part[-2:-1], dest=right, recvbuf=part[:1], source=left)
    part[1:-1] += 0.25 * (part[:-2] - 2 * part[1:-1] + part[2:])
energy = comm.allreduce(float((part[1:-1] ** 2).sum()))
warmest = np.zeros(1)
comm.Allreduce(part[1:-1].max(keepdims=True), warmest, op=MPI.MAX)
everything = np.empty(CELLS) if comm.rank == 0 else None
comm.Gatherv(part[1:-1].copy(), [everything, counts], root=0)
if comm.rank == 0:
    print(f"energy {energy:.12f}, warmest {warmest[0]:.12f}, sum {everything.sum():.12f}", flush=True)
