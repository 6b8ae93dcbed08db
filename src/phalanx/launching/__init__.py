"""Ranks that are started by Phalanx: the variables that they get, their processes, their output and their failures.

`launch` is the public function; `phalanx run` and `testing.run_ranks` use the same parts. `fork_server` starts the
processes, `running_ranks` watches them, `shipping` brings functions to them.
"""

from __future__ import annotations
