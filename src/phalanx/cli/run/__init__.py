"""`phalanx run`: starts a script on several ranks and stays with them to the end.

`arguments` reads the command line into a `Plan`; `launcher` starts what the plan says; `supervisor` is the loop that
follows. What it decides is in `ending`, what it prints in `lines` and `report`, whom it ends in `processes` and
`guardian`.
"""

from __future__ import annotations

from .arguments import command

__all__ = ["command"]
