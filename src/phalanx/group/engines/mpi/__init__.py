"""Collectives through the MPI library."""
