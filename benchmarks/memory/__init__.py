"""`python -m benchmarks memory`: memory per rank and time per step of a GPT with 124 million parameters.

The contenders are Phalanx's FSDP and DDP, and torch's on Phalanx and on Gloo. Memory is the rank's proportional share
(PSS): pages that several processes have in common count once, in equal parts.
"""
