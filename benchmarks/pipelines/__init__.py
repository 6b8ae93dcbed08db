"""`python -m benchmarks pipeline`: how long ranks of a pipeline are idle, beside theory and torch's `pipelining`.

Stages wait for some milliseconds instead of computing, so that the figures are those of the schedule and its messages,
also on a machine that has fewer processors than there are ranks.
"""
