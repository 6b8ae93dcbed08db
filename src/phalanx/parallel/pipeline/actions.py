"""The actions of a pipeline: the forward or the backward of one micro-batch in one stage."""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["Action", "Kind", "Orders"]

Kind = Literal["F", "B"]


class Action(NamedTuple):
    """A forward ("F") or a backward ("B") of one micro-batch in one stage."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch} of stage {self.stage}"

    def needs(self, stages: int) -> Action | None:
        """The action whose result this one waits for; None for a forward in the first stage.

        A backward in the last stage needs the forward there, all others the stage beside theirs.
        """
        if self.kind == "F":
            return Action("F", self.stage - 1, self.microbatch) if self.stage else None
        if self.stage == stages - 1:
            return Action("F", self.stage, self.microbatch)
        return Action("B", self.stage + 1, self.microbatch)


Orders = list[list[Action]]
"""For each rank, its actions in order."""
