"""`phalanx bench training`: steps of data-parallel training, and how much of each is spent waiting for other ranks.

The contenders are torch's DDP on Gloo, torch's DDP on Phalanx, and Phalanx's own DDP; all train the same models
(`models`) on the same data. Each takes part twice in every cell: as it is, and inside `no_sync()`, where every rank
trains for itself. What the first takes longer is the wait for communication.
"""
