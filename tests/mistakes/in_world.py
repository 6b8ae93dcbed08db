"""Makes mistakes in a world of two, one after the other, and writes what each rank was told: `in_world.py FILE`."""

from __future__ import annotations

import contextlib
import copy
import enum
import json
import linecache
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from tests.mistakes.mistakes import CALLS

import phalanx as px
from phalanx import rpc
from phalanx.frames import user_traceback
from phalanx.group.hints import add_hint

SCRIPT = "mistake.py"


class TorchOp(enum.Enum):
    """As torch's enumeration of reductions."""

    SUM = 0


def in_a_child(call: Callable[[], object]) -> None:
    """Calls it in a forked process, and raises what it raised there."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            call()
        except BaseException as error:
            os.write(writing, pickle.dumps(error))
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        raise pickle.load(pipe)


def add(a: int, b: int) -> int:
    return a + b


def give_file() -> Any:
    return sys.stdout


def divide() -> float:
    return 1 / 0


def told(program: str, names: dict[str, Any]) -> str:
    """The message of a program's error, as its user would see it; empty if there is none."""
    linecache.cache[SCRIPT] = (len(program), None, program.splitlines(keepends=True), SCRIPT)
    try:
        exec(compile(program, SCRIPT, "exec"), dict(names))
    except BaseException as error:
        add_hint(error, px.Group)
        error = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
        return user_traceback(error)
    return ""


def main(path: Path) -> None:
    world = px.init()
    with rpc.Agent(world) as agent:
        for function in (add, give_file, divide):
            agent.register(function)
        world.barrier()
        names = {
            "px": px,
            "np": np,
            "copy": copy,
            "pickle": pickle,
            "timedelta": timedelta,
            "TorchOp": TorchOp,
            "in_a_child": in_a_child,
            "world": world,
            "agent": agent,
            "rank": world.rank,
        }
        said = {}
        for mistake in CALLS:
            group = world.subgroup(range(world.world_size))
            said[mistake.name] = told(mistake.program, {**names, "group": group})
            world.barrier()
            with contextlib.suppress(px.PhalanxError):
                group.close()
        both = world.gather_object(said, dst=0)
        if both is not None:
            path.write_text(json.dumps(both))
        world.barrier()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except BaseException:
        traceback.print_exc()
        raise
