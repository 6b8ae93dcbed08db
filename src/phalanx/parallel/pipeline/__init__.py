"""Pipelines: the layers of a model spread over ranks, and micro-batches that pass through them.

`schedules` says who does what in which order, and `timeline` and `drawing` show it; `stages` cuts a model; `run`
executes a step over `wires`; `pipeline` has what a program calls.
"""
