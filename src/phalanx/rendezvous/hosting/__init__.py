"""Hosting a directory, on rank 0 or in the launcher: in a small process of its own.

In there it depends on nobody's GIL, and on no terminal: a rank that computes for seconds without a pause, or a launcher
that was stopped by Ctrl-Z, does not keep the others from hearing of a loss. `start` is the way in. `process` is the
host's side, `bootstrap` the program that it starts, and `service` what runs there.
"""
