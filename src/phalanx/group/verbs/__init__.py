"""The public verbs of a group by kind: reductions, gathers, objects, and messages between two ranks."""
