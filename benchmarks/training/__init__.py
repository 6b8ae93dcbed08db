"""`python -m benchmarks training`: steps of data-parallel training, and how long each waits for other ranks.

The contenders are torch's DDP on Gloo, torch's DDP on Phalanx, and Phalanx's own DDP; all train the same models
(`models`) on the same data. Each takes part twice in every cell: with all ranks, and in a group of one, where the
wrapper does everything else that it does. What the first takes longer is communication.
"""
