"""Runs the steps of a schedule over a lane, in Python or in the core."""
