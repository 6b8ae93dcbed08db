"""`python -m benchmarks pipeline`: how long ranks of a pipeline are idle, beside theory and torch's `pipelining`.

Stages wait for some milliseconds instead of computing, so that the figures are those of the schedule and its messages,
also on a machine that has fewer processors than there are ranks. Everything outside of the stages counts as idle: the
messages, autograd, and the program that runs the schedule. A machine that is busy with other work adds to it.
"""
