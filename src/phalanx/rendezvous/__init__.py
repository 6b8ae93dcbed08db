"""Forming a world, and noticing a loss: directory, handshakes, liveness."""
