"""The agent of remote calls on the classic wire, which a rank written in Rust understands: bytes in, bytes out."""

from __future__ import annotations

import concurrent.futures
import functools
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

from ...backends import Backend
from ...backends.plain import as_lane_backend
from ...deadline import Deadline
from ...errors import UsageError
from ...group import Group
from .calls import ClassicCalls
from .server import Functions, Handler

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ClassicAgent"]


class ClassicAgent:
    """Calls functions of other ranks and serves their calls, on the classic wire. It serves from the start.

    Until it is closed, the backend's own messages belong to it: do not use `send`, `recv` and `barrier` of the backend.
    Groups and sub-groups on the backend have streams of their own. On a backend that you wrote, the other ranks must
    run Phalanx, too: the length of a message must be known before it is received there.

    Ranks are those of the backend; errors carry ranks of the world, as everywhere.

    Args:
        backend: A backend, or a group, whose backend is used.
        workers: Handlers that run at the same time, not counting those that wait for a call of their own.
        max_queue: Requests that may wait for a worker or for calls of their own; more are answered with an error.
        timeout: The default of every call, in seconds; unset means the backend's.
        functions: Registered before the first request is read.

    Raises:
        UsageError: A number is too small, or the backend has an agent already.
        Closed: The backend is closed.
    """

    def __init__(
        self,
        backend: Backend | Group,
        *,
        workers: int = 4,
        max_queue: int = 256,
        timeout: float | None = None,
        functions: Mapping[str, Handler] | None = None,
    ) -> None:
        if workers < 1:
            raise UsageError(f"workers={workers} is not valid (expected at least 1)")
        if max_queue < 0:
            raise UsageError(f"max_queue={max_queue} is not valid (expected at least 0)")
        used = as_lane_backend(backend._backend if isinstance(backend, Group) else backend)
        used.check_usable()
        seconds = Deadline(used.timeout if timeout is None else timeout).seconds
        self._rank = used.rank
        self._world_size = used.world_size
        self._functions = Functions()
        for name, function in (functions or {}).items():
            self.register(name, function)
        self._calls = ClassicCalls(used, self._functions, workers, max_queue, seconds)
        self._drop = weakref.finalize(self, self._calls.drop)
        self._drop.atexit = False

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._world_size

    # -- functions -----------------------------------------------------------------------------------------------------

    @overload
    def register(self, name: str, fn: Handler) -> Handler: ...

    @overload
    def register(self, name: str) -> Callable[[Handler], Handler]: ...

    @overload
    def register(self, name: Handler) -> Handler: ...

    def register(self, name: str | Handler, fn: Handler | None = None) -> Any:
        """Registers a function: `register("add", fn)`, `@register("add")`, or `@register` for its own name.

        The function gets the payload and returns the result, both as bytes. Registering a name again replaces it.

        Raises:
            UsageError: It is not a function, or the name is not text.
        """
        if not isinstance(name, str):
            return self.register(getattr(name, "__name__", ""), name)
        if fn is None:
            return functools.partial(self.register, name)
        if not name or not callable(fn):
            raise UsageError(f"{fn!r} cannot be registered as {name!r} (expected a name and a function)")
        self._functions[name] = fn
        return fn

    # -- calls ---------------------------------------------------------------------------------------------------------

    def call(self, dst: int, name: str, payload: Any = b"", *, timeout: float | None = None) -> bytes:
        """Calls a function of another rank, or of this one, and returns its result.

        Raises:
            RemoteError: The function raised; the text is the other rank's.
            FunctionNotFound: There is none of that name; also a `RemoteError`.
            RpcTimeout: No answer came in time. One that comes later is dropped.
            PeerLost: The other rank is gone.
            InvalidMessage: The request is too large, or the answer cannot be read.
            Cancelled: The agent was closed meanwhile.
            InvalidRank, RpcNoConnection, UnsupportedArray: Before anything is sent.
            Closed: The agent or its backend was closed before.
            UsageError: In a callback of a call, which runs in the thread that would receive the answer.
        """
        return self._calls.client.call(self, dst, name, payload, timeout)

    def call_async(
        self, dst: int, name: str, payload: Any = b"", *, timeout: float | None = None
    ) -> concurrent.futures.Future[bytes]:
        """Starts a call. Its future raises what `call` does; its callbacks must not wait for other calls.

        Raises:
            InvalidRank, UnsupportedArray, InvalidMessage: The arguments are not valid.
            Closed: The agent or its backend is closed.
        """
        return self._calls.client.call_async(self, dst, name, payload, timeout)

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends the agent; the backend stays, and its messages are its own again. May be called twice.

        Calls under way raise `Cancelled`. Requests that wait are answered with an error; handlers that run may finish
        and answer, for a few seconds.
        """
        self._calls.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
