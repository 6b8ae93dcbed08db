"""Every error that Phalanx raises.

```
PhalanxError
├── ConfigError (ValueError)     InvalidRank  InvalidWorldSize  MissingVariable
├── UsageError (ValueError)      SelfSend  SizeMismatch  UnsupportedArray  UnsupportedOp  Closed
├── BackendUnavailable (ImportError)
├── RendezvousError              AuthenticationFailed  NoConnection  WorldNotFormed (also a Timeout)
├── Timeout (TimeoutError)
├── PeerLost (ConnectionError)   ChannelClosed
├── Evicted
├── Desync
├── OutOfResources (OSError)
├── CheckpointError              CheckpointNotFound (FileNotFoundError)
├── ProtocolError
├── RankFailed                   of launch(): also of the type that the rank raised
└── RpcError                     FunctionNotFound  InvalidArgument (TypeError)  InvalidMessage  RemoteError  Cancelled
                                 RpcTimeout (also a Timeout)  RpcNoConnection (also a NoConnection, ConnectionError)
```

No need to match on words: the type and the attributes of an error say what it is about. `rank` is the rank that
raises, `peer` the other one, `operation` what was under way; each is None where it does not apply.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "AuthenticationFailed",
    "BackendUnavailable",
    "Cancelled",
    "ChannelClosed",
    "CheckpointError",
    "CheckpointNotFound",
    "Closed",
    "ConfigError",
    "Desync",
    "Evicted",
    "FunctionNotFound",
    "InvalidArgument",
    "InvalidMessage",
    "InvalidRank",
    "InvalidWorldSize",
    "MissingVariable",
    "NoConnection",
    "OutOfResources",
    "PeerLost",
    "PhalanxError",
    "ProtocolError",
    "RankFailed",
    "RemoteError",
    "RendezvousError",
    "RpcError",
    "RpcNoConnection",
    "RpcTimeout",
    "SelfSend",
    "SizeMismatch",
    "Timeout",
    "UnsupportedArray",
    "UnsupportedOp",
    "UsageError",
    "WorldNotFormed",
]


class PhalanxError(Exception):
    """The root of all errors of this package."""

    def __init__(
        self,
        message: str = "",
        *,
        rank: int | None = None,
        peer: int | None = None,
        operation: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.rank = rank
        self.peer = peer
        self.operation = operation

    def __str__(self) -> str:
        return self.message


# -- configuration ---------------------------------------------------------------------------------------------------


class ConfigError(PhalanxError, ValueError):
    """The job was described in a way that cannot work."""


class InvalidRank(ConfigError):
    """A rank that does not exist in the world or group."""

    def __init__(self, value: int, world_size: int, message: str | None = None) -> None:
        if message is None:
            valid = f"valid ranks: 0 to {world_size - 1}" if world_size > 0 else "there are no ranks"
            message = f"rank {value} is not in a world of {world_size} ({valid})"
        super().__init__(message)
        self.value = value
        self.world_size = world_size


class InvalidWorldSize(ConfigError):
    """A number of ranks that cannot form this world or group."""

    def __init__(self, value: int, message: str | None = None, *, minimum: int = 1) -> None:
        super().__init__(message or f"world size {value} is not valid (expected at least {minimum})")
        self.value = value


class MissingVariable(ConfigError):
    """Some variables of a launcher are set, but one that belongs to them is not."""

    def __init__(self, variable: str, message: str | None = None) -> None:
        super().__init__(message or f"the environment variable {variable} is not set")
        self.variable = variable


# -- use -------------------------------------------------------------------------------------------------------------


class UsageError(PhalanxError, ValueError):
    """A call that is refused before anything is sent."""


class Closed(UsageError):
    """A group or backend was used after it was closed, or in a forked child."""


class SelfSend(UsageError):
    """A message to or from oneself on a backend that has no such connection."""

    def __init__(self, value: int) -> None:
        super().__init__(
            f"rank {value} cannot send to or receive from itself here (it has the value already: copy it)",
            rank=value,
            peer=value,
        )


class SizeMismatch(UsageError):
    """A message does not have the length that the receiver expects."""

    def __init__(self, expected: int, got: int, message: str | None = None, *, peer: int | None = None) -> None:
        where = "" if peer is None else f" from rank {peer}"
        text = message or f"expected a message of {expected} bytes{where}, got one of {got} bytes"
        super().__init__(text, peer=peer)
        self.expected = expected
        self.got = got


class UnsupportedArray(UsageError):
    """An object that cannot be sent or received as an array."""


class UnsupportedOp(UsageError):
    """An operation that this backend, dtype or reduction does not have."""


class BackendUnavailable(PhalanxError, ImportError):
    """An optional part is missing; the message names the package and how to install it."""


# -- rendezvous ------------------------------------------------------------------------------------------------------


class RendezvousError(PhalanxError):
    """The world could not form."""


class AuthenticationFailed(RendezvousError):
    """The other side does not know this job's token, or speaks for another role, rank or version."""


class NoConnection(RendezvousError):
    """There is no way from this rank to that one on this backend."""


# -- time and loss ---------------------------------------------------------------------------------------------------


class Timeout(PhalanxError, TimeoutError):
    """A deadline passed.

    `seconds` is how long the operation had, where that is known. `missing` holds the ranks that were waited for, as far
    as they are known, `arrived` those that had come.
    """

    def __init__(
        self,
        message: str = "",
        *,
        missing: Sequence[int] = (),
        arrived: Sequence[int] = (),
        seconds: float | None = None,
        rank: int | None = None,
        peer: int | None = None,
        operation: str | None = None,
    ) -> None:
        super().__init__(message, rank=rank, peer=peer, operation=operation)
        self.missing = tuple(missing)
        self.arrived = tuple(arrived)
        self.seconds = seconds


class WorldNotFormed(RendezvousError, Timeout):
    """The deadline passed before every rank had joined. `missing` names those that had not."""


class PeerLost(PhalanxError, ConnectionError):
    """A rank is gone: it died, it ended the world, or its machine stopped answering.

    `peer` is the rank that is lost. `remote_traceback` is the text of the exception that ended it, where it had time to
    say.
    """

    _state = "is lost"

    def __init__(
        self,
        peer: int,
        reason: str = "",
        *,
        rank: int | None = None,
        operation: str | None = None,
        remote_traceback: str | None = None,
    ) -> None:
        message = f"rank {peer} {self._state}" + (f": {reason}" if reason else "")
        if operation:
            message += f" (during {operation})"
        if remote_traceback:
            message = f"{message}\n\nTraceback of rank {peer}:\n{remote_traceback.rstrip()}"
        super().__init__(message, rank=rank, peer=peer, operation=operation)
        self.reason = reason
        self.remote_traceback = remote_traceback

    def during(self, operation: str, rank: int | None = None) -> PeerLost:
        """The same loss as seen by an operation: each raise gets an exception of its own."""
        return type(self)(
            self.peer if self.peer is not None else -1,
            self.reason,
            rank=rank,
            operation=operation,
            remote_traceback=self.remote_traceback,
        )


class ChannelClosed(PeerLost):
    """The other side closed the channel or the group on purpose."""

    _state = "is no longer there"


class Evicted(PhalanxError):
    """This rank was voted out: the others went on without it, because it did not answer in time.

    Nothing of it reaches them any more. It can only end, and join again as a new rank. A rank that wanted to join and
    was not let in hears this, too.
    """


class Desync(PhalanxError):
    """Two ranks called different operations. `mine` and `theirs` describe both."""

    def __init__(
        self,
        message: str,
        *,
        mine: str = "",
        theirs: str = "",
        rank: int | None = None,
        peer: int | None = None,
        operation: str | None = None,
    ) -> None:
        super().__init__(message, rank=rank, peer=peer, operation=operation)
        self.mine = mine
        self.theirs = theirs


class OutOfResources(PhalanxError, OSError):
    """The operating system has no more of something; the message names the limit and how to raise it.

    `errno` is the system's number for it.
    """

    def __init__(self, message: str, *, errno: int | None = None, rank: int | None = None) -> None:
        super().__init__(message, rank=rank)
        self.errno = errno


class CheckpointError(PhalanxError):
    """A checkpoint could not be written or read. `path` is the file or folder, `tensor` the name of what was in it."""

    def __init__(self, message: str = "", *, path: str | None = None, tensor: str | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.tensor = tensor


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """There is no checkpoint."""


class ProtocolError(PhalanxError):
    """Bytes that do not follow the protocol: the connection that brought them is closed."""


class RankFailed(PhalanxError):
    """A rank of `launch` or `testing.run_ranks` failed. Where possible it is also of the type that the rank raised.

    So `except ValueError` and `pytest.raises(PeerLost)` see it, and the attributes of the original are here, too.

    Attributes:
        failed_rank: The rank that failed first.
        remote_traceback: Where, as text.
    """

    def __init__(self, message: str, failed_rank: int, remote_traceback: str = "") -> None:
        super().__init__(message)
        self.failed_rank = failed_rank
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        return self.message


# -- remote calls ----------------------------------------------------------------------------------------------------


class RpcError(PhalanxError):
    """A remote call failed."""


class FunctionNotFound(RpcError):
    """No function of that name is registered on the rank that was called."""


class InvalidArgument(RpcError, TypeError):
    """An argument that the called function does not take; the message says which one and what would be valid."""


class InvalidMessage(RpcError):
    """A remote-call message that cannot be read; the message says which field was cut short or wrong."""


class RemoteError(RpcError):
    """The function that was called raised. The remote type and traceback are text: nothing is unpickled."""

    def __init__(
        self,
        message: str,
        *,
        remote_type: str = "",
        remote_traceback: str = "",
        peer: int | None = None,
        operation: str | None = None,
    ) -> None:
        super().__init__(message, peer=peer, operation=operation)
        self.remote_type = remote_type
        self.remote_traceback = remote_traceback


class Cancelled(RpcError):
    """The call was cancelled before it had a result."""


class RpcTimeout(RpcError, Timeout):
    """The deadline of a remote call passed."""


class RpcNoConnection(RpcError, NoConnection, ConnectionError):
    """There is no way from this rank to the one that is called."""


def copy_for_raise(error: BaseException, operation: str, rank: int | None) -> BaseException:
    """A copy of an error that several threads may share: the same message, but a traceback of its own."""
    if isinstance(error, PeerLost):
        return error.during(operation, rank)
    if isinstance(error, PhalanxError):
        copy = error.__class__.__new__(error.__class__)
        copy.__dict__.update(error.__dict__)
        copy.args = error.args
        copy.operation = error.operation or operation
        copy.rank = error.rank if error.rank is not None else rank
        return copy
    return error


def of_call(error: BaseException) -> BaseException:
    """The error that a remote call raises for one of the layers below: what ends a call is an `RpcError`, too."""
    for kind, call_kind in ((Timeout, RpcTimeout), (NoConnection, RpcNoConnection)):
        if isinstance(error, kind) and not isinstance(error, RpcError):
            made = call_kind.__new__(call_kind)
            made.__dict__.update(error.__dict__)
            made.args = error.args
            return made
    return error
