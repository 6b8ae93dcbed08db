"""The words between the controller and its nodes. No I/O.

To the node, on its standard input: one line of JSON with the job, then a line for each signal. From the node, on its
standard error among the lines of the ranks: lines of JSON behind a mark.
"""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, TypeAlias

__all__ = [
    "MARK",
    "Message",
    "NodeEnd",
    "NodeEnding",
    "NodeError",
    "NodeHello",
    "NodeJob",
    "NodeView",
    "decode",
    "encode",
]

MOST_SHOWN = 32 << 20
"""Bytes of a picture: those of a thousand ranks have some."""
MARK = b"\x1ephalanx-node "
"""Begins a line of the node itself: a control character that no program prints by chance."""


@dataclass(frozen=True, kw_only=True)
class NodeHello:
    """The first word of a node, before it knows what to do."""

    KIND: ClassVar[str] = "hello"
    version: str
    """Of Phalanx."""
    python: str
    hostname: str
    address: str = ""
    """Where the controller reached this host, as sshd says; empty if nobody does."""
    ports: tuple[int, ...] = ()
    """Two that are free there."""


@dataclass(frozen=True, kw_only=True)
class NodeEnding:
    """The node begins to end its ranks."""

    KIND: ClassVar[str] = "ending"
    why: str


@dataclass(frozen=True, kw_only=True)
class NodeError:
    """The node could not start its part of the job."""

    KIND: ClassVar[str] = "error"
    text: str


@dataclass(frozen=True, kw_only=True)
class NodeEnd:
    """The verdict of a node. Only pictures of its last look follow."""

    KIND: ClassVar[str] = "end"
    code: int
    failed: bool
    """A rank failed, here or elsewhere."""
    blamed: int | None = None
    """The rank that is to blame, as far as this node knows."""
    own: int | None = None
    """The rank of this node that the report is about; None if it is about one of another node."""
    report: str = ""
    same: tuple[int, ...] = ()
    """Other ranks of this node that failed in the same way."""
    because: int = 0
    """How many ranks of this node ended because of it."""
    headline: str = ""
    """A few words on what was wrong."""


@dataclass(frozen=True, kw_only=True)
class NodeView:
    """Something of the job to be shown by the controller: from the first node, which sees all ranks."""

    KIND: ClassVar[str] = "view"
    what: str
    """`picture`, `page` or `trace`; see `Upstream.show`."""
    packed: str

    @classmethod
    def of(cls, what: str, data: bytes) -> NodeView:
        """The message with these contents."""
        return cls(what=what, packed=base64.b64encode(zlib.compress(data, 1)).decode())

    @property
    def data(self) -> bytes:
        """The contents.

        Raises:
            ValueError: They are damaged, or longer than any that `of` makes.
        """
        unpacker = zlib.decompressobj()
        try:
            found = unpacker.decompress(base64.b64decode(self.packed), MOST_SHOWN)
        except zlib.error as error:
            raise ValueError(str(error)) from None
        if not unpacker.eof:
            raise ValueError(f"it is cut short, or has more than {MOST_SHOWN} bytes")
        return found


@dataclass(frozen=True, kw_only=True)
class NodeJob:
    """The job as one node sees it."""

    KIND: ClassVar[str] = "job"
    target: str
    arguments: tuple[str, ...]
    module: bool
    python: bool
    node: int
    layout: tuple[int, ...]
    """The ranks of each node."""
    names: tuple[str, ...]
    """The names of all nodes."""
    master: tuple[str, int]
    directory_port: int
    token: str = field(repr=False)
    folder: str
    """The working folder."""
    log_dir: str | None
    grace: float
    prefix: bool
    colour: bool
    extra: dict[str, str]
    """Variables for the ranks."""
    variables: dict[str, str]
    """Phalanx's own variables, as they are set where the job was started."""
    relayed: tuple[str, ...] = ()
    """The options by which the controller shows the job; for the first node alone."""


Message: TypeAlias = NodeHello | NodeEnding | NodeError | NodeEnd | NodeJob | NodeView
_KINDS: dict[str, type[Message]] = {
    kind.KIND: kind for kind in (NodeHello, NodeEnding, NodeError, NodeEnd, NodeJob, NodeView)
}


def encode(message: Message) -> bytes:
    """A message as one line of JSON, without the mark."""
    return json.dumps({"kind": message.KIND, **asdict(message)}).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message in a line.

    Raises:
        ValueError: It is none, or one of another version.
    """
    try:
        fields = json.loads(line)
        kind: Any = _KINDS[fields.pop("kind")]
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
        message: Message = kind(**values)
        return message
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a message of this version: {error}") from None
