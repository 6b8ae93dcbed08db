"""MPI as a backend, whose library is loaded when it is asked for."""
