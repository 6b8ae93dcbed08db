"""`python -m benchmarks torch`: the collectives of torch.distributed on Phalanx's plug-in, beside Gloo in the same run.

It is `phalanx bench` with other contenders: both call `torch.distributed` (`with_lists`), and differ in the one
string. `goals` says what is asked of the plug-in.
"""
