"""`python -m benchmarks checkpoint`: time to save a checkpoint, beside torch's DCP and a plain write of the same bytes.

All take turns in the same processes, on the same disk. A save is over when the last rank returns from it; every
contender has the bytes on the disk by then (`fsync`).
"""
