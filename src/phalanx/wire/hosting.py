"""The messages between the directory's process and its host (rank 0, or the launcher). No I/O.

They use a socket pair that no other process holds, and the framing of control messages. A rank cannot send any of
these: its connection is read by another decoder.
"""

from __future__ import annotations

import msgspec

from .control import MAX_CONTROL, Abort, Ended, MessageReader, Note, Struct

__all__ = [
    "AwaitOthers",
    "Close",
    "Failed",
    "HostMessage",
    "HostReader",
    "Launchers",
    "Log",
    "OthersGone",
    "Ready",
    "Reserve",
    "Settings",
    "Setup",
    "Tls",
    "WorldEnded",
]


class Tls(msgspec.Struct, frozen=True, array_like=True):
    """`config.TlsOptions` for the directory."""

    certificate: str
    key: str
    ca: str


class Settings(msgspec.Struct, frozen=True, array_like=True):
    """Those of `config.Options` that a directory needs. Its process does without `config`, to start sooner."""

    heartbeat: float
    heartbeat_timeout: float
    handshake_timeout: float
    max_pending_handshakes: int
    tls: Tls | None = None


class Setup(Struct, frozen=True):
    """The host's first words: what to serve."""

    world_size: int
    token: bytes | None
    settings: Settings
    one_world: bool
    job_file: bytes
    """The file by which the ranks find each other, to be removed once they have; empty if there is none."""
    log_level: int
    elastic: int = 0
    """The most ranks of a world that outlives them; 0 for one that does not."""


class AwaitOthers(Struct, frozen=True):
    """The host asks to hear when every rank but this one is gone."""

    rank: int


class Reserve(Struct, frozen=True):
    """The host starts a process that will join under this number: no other rank may get it."""

    rank: int


class Close(Struct, frozen=True):
    """The host wants the directory to end."""


class Ready(Struct, frozen=True):
    """The directory serves, in this process."""

    pid: int


class Failed(Struct, frozen=True):
    """The directory cannot serve."""

    reason: str


class WorldEnded(Struct, frozen=True):
    """A rank aborted the world or was lost."""

    rank: int
    reason: str
    traceback: str
    aborted: bool


class OthersGone(Struct, frozen=True):
    """The answer to `AwaitOthers`."""


class Launchers(Struct, frozen=True):
    """The number of launchers of other nodes that watch now."""

    count: int


class Log(Struct, frozen=True):
    """A line for the host's log."""

    level: int
    name: str
    text: str


HostMessage = (
    Setup
    | Abort
    | Ended
    | AwaitOthers
    | Reserve
    | Close
    | Ready
    | Failed
    | WorldEnded
    | OthersGone
    | Launchers
    | Note
    | Log
)

_decoder: msgspec.msgpack.Decoder[HostMessage] = msgspec.msgpack.Decoder(HostMessage)


class HostReader(MessageReader[HostMessage]):
    """Reads what comes over the socket pair."""

    def __init__(self) -> None:
        super().__init__(_decoder, MAX_CONTROL)
