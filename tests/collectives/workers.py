"""All ranks of a world in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import phalanx as px


class Workers:
    """All ranks of a world in one process, each driven by a thread that outlives the examples."""

    def __init__(self, groups: list[px.Group]) -> None:
        self.groups = groups
        self.size = len(groups)

    def run(self, body: Callable[[px.Group], Any]) -> list[Any]:
        """What `body` returns on each rank."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def work(rank: int) -> None:
            try:
                results[rank] = body(self.groups[rank])
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive(), "a rank hangs"
        if errors:
            raise errors[0]
        return results
