"""`python -m benchmarks elastic`: the cost of a step of `px.elastic.steps` against a plain one, when nothing fails.

A step computes for a given time and reduces 4 KiB. Plain loops and elastic ones take turns in the same processes, some
steps of each at a time.
"""
