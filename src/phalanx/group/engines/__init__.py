"""Engines that move the data of collectives: shared memory, the network, both, the classic wire, or MPI."""
