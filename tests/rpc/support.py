"""Agents on some ranks, what they hold, and a peer that speaks by hand."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from tests.lateness import bound

import phalanx as px
from phalanx.backends import SubBackend
from phalanx.deadline import Deadline
from phalanx.rpc.payload import Limits, encode_call
from phalanx.testing import run_ranks
from phalanx.wire.calls import HEADER_SIZE, CallHeader, CallKind, pack_header, parse_header

WORLDS: dict[str, tuple[str, dict[str, Any]]] = {
    "rings": ("mesh", {"options": px.Options(transport="auto")}),
    "tcp": ("mesh", {"options": px.Options(transport="tcp")}),
    "simulated": ("simulated", {}),
    "star": ("tcp", {}),
    "classic mesh": ("mesh-classic", {}),
    "pure": ("mesh", {"env": {"PHALANX_PURE": "1"}}),
    "subgroup": ("mesh", {}),
    "sub-backend": ("mesh", {}),
}
"""What `run` knows: the backend, and arguments for `run_ranks`. Ranks are processes, but for "simulated"."""
LIMIT = 40.0
"""Seconds that nothing here needs."""

Setup = Callable[[px.rpc.Agent], Any]
Act = Callable[..., Any]


def world_of(where: str) -> dict[str, Any]:
    """The arguments of `run_ranks` for a kind of world."""
    backend, arguments = WORLDS[where]
    return {"backend": backend, **arguments}


def run(
    where: str,
    n: int,
    setup: Setup,
    act: Act,
    *args: Any,
    everyone: bool = False,
    limit: float = LIMIT,
    may_die: Collection[int] = (),
    env: Mapping[str, str] | None = None,
    options: px.Options | None = None,
    **agent: Any,
) -> Any:
    """Makes an agent on each of `n` ranks; `setup(agent)` on all of them, then `act(agent, *args)` on rank 0.

    Args:
        everyone: Act on all ranks at the same time, and return what each returned.
        agent: For `px.rpc.Agent`.
    """
    backend, arguments = WORLDS[where]
    arguments = {**arguments, **({"env": env} if env else {}), **({"options": options} if options else {})}
    results = run_ranks(
        n, _rank, where, setup, act, args, everyone, agent, backend=backend, timeout=limit, may_die=may_die, **arguments
    )
    return results if everyone else results[0]


def _rank(
    world: px.Group, where: str, setup: Setup, act: Act, args: tuple[Any, ...], everyone: bool, agent: dict[str, Any]
) -> Any:
    group = world
    if where == "subgroup":
        group = world.subgroup(list(reversed(range(world.world_size))))
    elif where == "sub-backend":
        group = px.Group(SubBackend(world._backend, list(reversed(range(world.world_size)))))
    with px.rpc.Agent(group, **agent) as made:
        setup(made)
        group.barrier()
        result = act(made, *args) if everyone or group.rank == 0 else None
        group.barrier()  # nobody closes while another still calls
    return result


def at_once(count: int, act: Callable[[int], Any], limit: float = 30.0) -> list[Any]:
    """What `act(number)` returns or raises in so many threads that begin together."""
    results: list[Any] = [TimeoutError("it is not done")] * count
    begin = threading.Barrier(count)

    def body(number: int) -> None:
        begin.wait()
        try:
            results[number] = act(number)
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=body, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + limit
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return results


def error_of(act: Callable[..., Any], *args: Any, **kwargs: Any) -> BaseException:
    """What a call raises."""
    try:
        value = act(*args, **kwargs)
    except Exception as error:
        return error
    raise AssertionError(f"nothing was raised; it returned {value!r}")


def until(condition: Callable[[], object], what: str, limit: float = 10.0) -> None:
    """Waits until something holds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < bound(limit), f"waited {limit:g} s for {what}"
        time.sleep(0.005)


# -- what a process holds --------------------------------------------------------------------------------------------


def memory() -> int:
    """MiB of memory that this process has in use."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) >> 10


def held() -> dict[str, int]:
    """Threads, descriptors, mappings and files of this process that an agent may have."""
    gc.collect()
    shared = Path("/dev/shm")
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": Path("/proc/self/maps").read_text().count("phalanx-ring"),
        "/dev/shm": sum("phalanx" in entry.name for entry in shared.iterdir()) if shared.is_dir() else 0,
    }


def open_rings() -> int:
    """Descriptors of this process that are the memory of a ring."""
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the folder itself is gone by now
            count += "phalanx-ring" in os.readlink(entry)
    return count


# -- by hand ---------------------------------------------------------------------------------------------------------


def frame(kind: int, call: int = 0, head: bytes = b"", payload: bytes = b"") -> bytes:
    """A frame as it stands on the wire."""
    return pack_header(kind, len(head), call, len(payload)) + head + payload


def request(
    call: int, name: str, *args: Any, kind: int = CallKind.REQUEST, target: int = 0, seconds: float = 10.0
) -> bytes:
    """The frame of a call."""
    out = encode_call(name, target, seconds, args, {}, Limits())
    return frame(kind, call, out.head, b"".join(map(bytes, out.buffers)))


def dial(agent: px.rpc.Agent, dst: int) -> socket.socket:
    """A connection to another rank's agent with the world's handshake, but nobody behind it who knows the rules."""
    sock: socket.socket = agent._connections.port.dial(dst, Deadline(10.0))._socket
    sock.settimeout(5.0)
    return sock


def read_exactly(sock: socket.socket, size: int) -> bytes:
    """So many bytes; fewer if the other side has closed."""
    data = b""
    while len(data) < size:
        try:
            piece = sock.recv(size - len(data))
        except ConnectionResetError:
            piece = b""
        if not piece:
            break
        data += piece
    return data


def read_frame(sock: socket.socket) -> tuple[CallHeader, bytes] | None:
    """A frame that came; None if the other side has closed."""
    data = read_exactly(sock, HEADER_SIZE)
    if len(data) < HEADER_SIZE:
        return None
    header = parse_header(data, 0, 1 << 30)
    return header, read_exactly(sock, header.head + header.payload)
